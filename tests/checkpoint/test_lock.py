"""One run at a time writes to a directory.

A refused run's error names the holder, and the lock ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stagereg.checkpoint.lock as lock
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.lock import DirectoryLock, Owner, holder
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.errors import CheckpointError

BOUND_S = 60
OTHER = """
import sys
from stagereg.checkpoint.lock import DirectoryLock
held = DirectoryLock(sys.argv[1], patience=60)
print("held", flush=True)
sys.stdin.read()
held.release()
"""
FORKING = """
import os, sys
from stagereg.checkpoint.lock import DirectoryLock
held = DirectoryLock(sys.argv[1])
inside, outside = os.pipe()
if os.fork() == 0:
    os.close(outside)
    del held
    os.read(inside, 1)  # until its parent is gone
    print("forked child has ended", flush=True)
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
held.release()
print("released", flush=True)
sys.stdin.close()
os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
"""
CONTEST = """
import os, sys
from stagereg.checkpoint.lock import DirectoryLock
for _ in range(int(sys.argv[2])):
    with DirectoryLock(sys.argv[1], patience=60):
        os.close(os.open(sys.argv[1] + "/inside", os.O_CREAT | os.O_EXCL))
        os.unlink(sys.argv[1] + "/inside")
"""


class Other:
    """Another process that holds a directory."""

    def __init__(self, root: Path, program: str = OTHER, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self.line() == "held"

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND_S)[0]
        return self.process.stdout.readline().decode().strip()

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    process = Other(tmp_path)
    yield process
    process.end()


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), value)}


def test_a_second_run_is_refused_by_name_and_touches_nothing_of_the_first(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryLock.__init__, "__defaults__", (0.1,))
    being_written = tmp_path / ".step-00000002.abc.tmp"
    being_written.mkdir()
    with pytest.raises(CheckpointError, match=rf"in use.*process {other.pid} on .*-c.*directory of its own") as refusal:
        Checkpointer(str(tmp_path))
    assert len(str(refusal.value).splitlines()) == 1
    assert being_written.is_dir()
    other.end()
    Checkpointer(str(tmp_path)).close()
    assert os.listdir(tmp_path) == []


def test_a_run_that_starts_while_the_owner_ends_waits(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_meanwhile(seconds: float) -> None:
        other.release()
        other.process.wait(BOUND_S)

    waits = SimpleNamespace(Event=lambda: SimpleNamespace(wait=end_meanwhile), DirectoryLock=threading.Lock)
    monkeypatch.setattr(lock, "threading", waits)
    DirectoryLock(tmp_path).release()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    parent = Other(tmp_path, FORKING, str(gate))
    parent.release()
    assert parent.line() == "released"
    DirectoryLock(tmp_path, patience=0).release()  # the child still lives
    gate.open("w").close()
    assert parent.line() == "forked child has ended"
    parent.end()


def test_two_checkpointers_of_one_process_are_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first = Checkpointer(str(tmp_path / "run"))
    (tmp_path / "same").symlink_to(tmp_path / "run")
    for path in ("run", "same"):
        with pytest.raises(CheckpointError, match=r"another Checkpointer of this process; close\(\)"):
            Checkpointer(str(tmp_path / path))
    first.save(1, state())
    first.close()
    Checkpointer(str(tmp_path / "run")).close()


def test_a_garbage_collected_checkpointer_holds_nothing(tmp_path: Path) -> None:
    forgotten = Checkpointer(str(tmp_path))
    forgotten.itself = forgotten  # type: ignore[attr-defined]
    gc.disable()
    try:
        del forgotten
        Checkpointer(str(tmp_path)).close()
    finally:
        gc.enable()


def test_a_checkpointer_that_cannot_begin_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: LocalStore) -> None:
        raise OSError(errno.EIO, "bad disk")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "sweep", fails)
        with pytest.raises(CheckpointError, match="bad disk"):
            Checkpointer(str(tmp_path))
    assert holder(tmp_path) is None
    DirectoryLock(tmp_path, patience=0).release()


def test_a_lock_that_this_process_lost_by_closing_the_file_is_taken_again(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as held:
        (tmp_path / lock.LOCK).open().close()
        held.check()
        refused = subprocess.run(
            [sys.executable, "-c", OTHER.replace("patience=60", "patience=0"), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        assert f"process {os.getpid()}" in refused.stderr


def test_a_directory_that_was_deleted_is_held_again_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DirectoryLock(tmp_path) as held:
        (tmp_path / lock.LOCK).unlink()
        with caplog.at_level(logging.WARNING):
            held.check()
            held.check()
        assert [record.getMessage() for record in caplog.records] == [
            f"stagereg: {tmp_path / lock.LOCK} was deleted while this run held it; it is held again."
        ]
        assert holder(tmp_path) is not None
        with pytest.raises(CheckpointError):
            DirectoryLock(tmp_path)


def test_a_save_fails_after_another_run_has_taken_over_and_does_not_touch_its_files(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    (tmp_path / lock.LOCK).unlink()
    other = Other(tmp_path)
    checkpointer.save(1, state())
    with pytest.raises(CheckpointError) as failure:
        checkpointer.close()
    assert f"taken over while this run had it, by process {other.pid}" in str(failure.value)
    assert sorted(os.listdir(tmp_path)) == [".lock", ".lock.owner"]
    assert holder(tmp_path) is not None
    other.end()


def test_a_released_lock_may_not_commit(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path)
    held.release()
    held.release()
    with pytest.raises(CheckpointError, match="let go"):
        held.check()


def test_any_process_can_look_up_who_holds_a_directory(tmp_path: Path, other: Other) -> None:
    owner = holder(tmp_path)
    assert isinstance(owner, Owner)
    assert (owner.pid, owner.command) == (other.pid, f"-c {tmp_path}")
    other.end()
    assert holder(tmp_path) is None  # what its owner wrote is still there
    with DirectoryLock(tmp_path):
        own = holder(tmp_path)
        assert own is not None
        assert own.pid == os.getpid()
    assert holder(tmp_path) is holder(tmp_path / "nowhere") is None


NO_DATE = json.dumps({"pid": 1, "host": "h", "since": 1e300, "command": "c"})


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', json.dumps({"pid": None, "host": 1}), NO_DATE])
def test_an_owner_that_cannot_be_read_is_another_process(tmp_path: Path, content: str) -> None:
    with DirectoryLock(tmp_path):
        (tmp_path / ".lock.owner").write_text(content)
        owner = holder(tmp_path)
        assert owner is not None
        assert str(owner) == "another process"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_in_the_way_of_the_owner_file_is_neither_followed_nor_waited_for(
    tmp_path: Path, kind: str
) -> None:
    root, notes = tmp_path / "run", tmp_path / "notes"
    root.mkdir()
    notes.write_text("mine")

    def lay() -> None:
        if kind == "link":
            (root / ".lock.owner").symlink_to(notes)
        else:
            os.mkfifo(root / ".lock.owner")

    lay()
    with DirectoryLock(root):
        owner = holder(root)
        assert owner is not None
        assert owner.pid == os.getpid()
        (root / ".lock.owner").unlink()
        lay()
        assert str(holder(root)) == "another process"
    assert notes.read_text() == "mine"


def test_control_characters_in_the_owner_file_are_not_printed(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path):
        owner = {"pid": 1, "host": "a\x1b[2Jb", "since": 0, "command": "c\nd"}
        (tmp_path / ".lock.owner").write_text(json.dumps(owner))
        assert str(holder(tmp_path)).isprintable()


def _without_locks(number: int) -> Callable[[int, int], None]:
    def lockf(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return lockf


@pytest.mark.parametrize("number", [errno.ENOLCK, pytest.param(errno.EOPNOTSUPP, marks=pytest.mark.slow)])
def test_a_file_system_without_locks_is_warned_of_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(fcntl, "lockf", _without_locks(number))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with Checkpointer(str(tmp_path)) as checkpointer:
                checkpointer.save(1, state())
                with pytest.raises(CheckpointError, match="this process"):
                    Checkpointer(str(tmp_path))
    seen = [record.getMessage() for record in caplog.records if "no locks" in record.getMessage()]
    assert len(seen) == 1
    assert str(tmp_path) in seen[0]


def test_only_one_of_many_processes_holds_the_lock_at_a_time(tmp_path: Path) -> None:
    contest = [sys.executable, "-c", CONTEST, str(tmp_path), "30"]
    contestants = [subprocess.Popen(contest, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        seen = [each.communicate(timeout=BOUND_S)[1] for each in contestants]
    finally:
        for each in contestants:
            each.kill()
    assert [each.returncode for each in contestants] == [0, 0, 0], seen
    assert os.listdir(tmp_path) == []


def test_a_lock_file_deleted_while_it_is_being_locked_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.lockf
    deleted: list[Path] = []

    def lockf(descriptor: int, operation: int) -> None:
        if not deleted:
            deleted.append(tmp_path / lock.LOCK)
            deleted[0].unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with DirectoryLock(tmp_path) as held:
        assert (tmp_path / lock.LOCK).exists()
        found = os.stat(tmp_path / lock.LOCK)
        assert held._taken.identity == (found.st_dev, found.st_ino)
