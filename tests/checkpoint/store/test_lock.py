"""One run at a time writes to a directory or URL: others are refused by its name, and the lock ends with its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagereg.checkpoint.store.lock as lock
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.lease import LeaseRecord
from stagereg.checkpoint.store.lock import Owner, StoreLock, holder
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError
from tests.support.places import PLACES, place

from ...commands.checkpoint_directories import save
from ...support.watching import watching

BOUND_S = 60
PROGRAM = Path(__file__).parents[2] / "support" / "lock_holder.py"


class Other:
    """Another process that holds a directory."""

    def __init__(self, root: Path, what: str = "hold", *arguments: str) -> None:
        command = [sys.executable, str(PROGRAM), what, str(root), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.pid = self.process.pid
        assert self.line() == "held"

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


# -- a lock of either kind


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "path" else place("url", tmp_path)


def delete_lock(root: str) -> None:
    open_store(root).backend.delete(f"{root}/.lock")


def test_a_deleted_lock_is_held_again_and_reported(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(root).lock() as held:
        delete_lock(root)
        with caplog.at_level(logging.WARNING):
            held.check()
            held.check()
        assert [record.getMessage() for record in caplog.records] == [
            f"stagereg: {root}/.lock was deleted while this run held the lock. It is locked again."
        ]
        with pytest.raises(CheckpointError, match="this process"):
            open_store(root).lock()


def test_a_run_that_stood_still_while_another_one_had_the_directory_commits_nothing(root: str) -> None:
    stood_still = Checkpointer(root)
    stood_still.save(1, {"x": 1})
    stood_still.wait()
    delete_lock(root)  # as the server of a file system does with that of a machine which it does not hear of
    save(root, 2)
    stood_still.save(3, {"x": 1})
    with pytest.raises(CheckpointError, match="another run has committed"):
        stood_still.close()
    assert [each.manifest.step for each in open_store(root).checkpoints()[0]] == [2, 1]


@pytest.mark.parametrize("moment", ["marked", "committed", "pointed"])
def test_a_run_that_stands_still_in_a_commit_takes_nothing_of_the_one_after_it(root: str, moment: str) -> None:
    others: list[Other] = []

    def stand_still(name: str) -> None:
        if name != moment:
            return
        delete_lock(root)
        if root[0] == "/":
            others.append(Other(Path(root)))
        else:
            open_store(root).backend.write(
                f"{root}/.lock", LeaseRecord(Owner(4242, "far"), "theirs", "far", time.time()).dumps()
            )

    checkpointer = Checkpointer(root, keep=1)
    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    checkpointer.save(2, {"x": 1})
    with watching(stand_still), contextlib.suppress(CheckpointError):
        checkpointer.close()
    for each in others:
        each.end()
    steps = [each.manifest.step for each in open_store(root).checkpoints()[0]]
    assert steps == ([1] if moment == "marked" else [2, 1])
    latest = open_store(root).latest()
    assert latest is not None
    assert latest.manifest.step == (2 if moment == "pointed" else 1)


# -- that of a directory


def test_a_second_run_is_refused_and_the_first_one_named(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreLock.__init__, "__defaults__", (0.1,))
    being_written = tmp_path / ".step-00000002.abc.tmp"
    being_written.mkdir()
    with pytest.raises(
        CheckpointError, match=rf'in use.*process {other.pid} on .*its own directory: dir="PATH"'
    ) as refusal:
        Checkpointer(str(tmp_path)).lock()
    assert len(str(refusal.value).splitlines()) == 1
    owner = holder(tmp_path)
    assert owner is not None
    assert owner.pid == other.pid
    assert owner.command.startswith(str(PROGRAM))
    assert being_written.is_dir()
    other.end()
    assert holder(tmp_path) is None  # what its owner wrote is still there
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.lock()
    assert os.listdir(tmp_path) == []


def test_a_shortened_command_ends_with_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, shown in (("a" * 120, "a" * 120), ("a" * 121, "a" * 120 + "...")):
        monkeypatch.setattr(sys, "argv", [command])
        assert Owner.ourselves().command == shown


def test_a_run_that_starts_while_the_owner_ends_waits(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_meanwhile(seconds: float) -> None:
        other.release()
        other.process.wait()  # without a limit, or else it would sleep as well

    monkeypatch.setattr(lock.time, "sleep", end_meanwhile)
    mine = StoreLock(tmp_path)
    owner = holder(tmp_path)
    assert owner is not None
    assert owner.pid == os.getpid()
    mine.release()


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    parent = Other(tmp_path, "fork", str(gate))
    parent.release()
    assert parent.line() == "released"
    StoreLock(tmp_path, patience=0).release()  # the child still lives
    gate.open("w").close()
    assert parent.line() == "forked child has ended"
    parent.end()


def test_only_one_of_many_processes_holds_the_lock_at_a_time(tmp_path: Path) -> None:
    contest = [sys.executable, str(PROGRAM), "contest", str(tmp_path), "30"]
    contestants = [subprocess.Popen(contest, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        seen = [each.communicate(timeout=BOUND_S)[1] for each in contestants]
    finally:
        for each in contestants:
            each.kill()
    assert [each.returncode for each in contestants] == [0, 0, 0], seen
    assert os.listdir(tmp_path) == []


def test_a_link_to_a_held_directory_is_that_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "run")
    with StoreLock(tmp_path / "run"), pytest.raises(CheckpointError, match="this process"):
        StoreLock(tmp_path / "same")
    assert holder(tmp_path / "run") is holder(tmp_path / "nowhere") is None


def test_a_garbage_collected_checkpointer_holds_nothing(tmp_path: Path) -> None:
    forgotten = Checkpointer(str(tmp_path))
    forgotten.lock()
    forgotten.itself = forgotten  # type: ignore[attr-defined]
    gc.disable()
    try:
        del forgotten
        Checkpointer(str(tmp_path)).lock()
    finally:
        gc.enable()


def test_a_checkpointer_that_cannot_begin_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(store: CheckpointStore) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(CheckpointStore, "sweep", fails)
    with pytest.raises(CheckpointError, match="bad disk"):
        Checkpointer(str(tmp_path)).lock()
    StoreLock(tmp_path, patience=0).release()


def test_a_lock_lost_by_closing_the_file_is_taken_again(tmp_path: Path) -> None:
    with StoreLock(tmp_path) as held:
        (tmp_path / lock.LOCK).open().close()
        held.check()
        command = [sys.executable, str(PROGRAM), "hold", str(tmp_path), "0"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert f"process {os.getpid()}" in refused.stderr


def test_a_save_fails_after_another_run_has_taken_over(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.lock()
    delete_lock(str(tmp_path))
    other = Other(tmp_path)
    for step, end in ((1, checkpointer.wait), (2, checkpointer.close)):
        checkpointer.save(step, {"x": 1})
        with pytest.raises(CheckpointError, match=f"process {other.pid} .* has taken the lock of .* from this run"):
            end()
    assert os.listdir(tmp_path) == [".lock"]
    owner = holder(tmp_path)
    assert owner is not None
    assert owner.pid == other.pid
    other.end()


OWNER = {"pid": 1, "host": "h", "since": 0, "command": "c"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("", "another process"),
        ("[1]", "another process"),
        ("[" * 10_000, "another process"),
        (json.dumps({**OWNER, "host": 1}), "another process"),
        (json.dumps({**OWNER, "since": 1e300}), "another process"),
        (json.dumps({**OWNER, "host": "a\x1b[2Jb", "command": "c\nd"}), "process 1 on 'a"),
    ],
)
def test_what_an_owner_wrote_is_fit_to_be_printed(tmp_path: Path, content: str, shown: str) -> None:
    with StoreLock(tmp_path) as held:
        os.truncate(tmp_path / lock.LOCK, 0)
        os.pwrite(held._descriptor, content.encode(), 0)
        owner = lock._read_owner(held._descriptor)
        assert str(owner).startswith(shown)
        assert str(owner).isprintable()


def test_a_link_or_pipe_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    notes, path = tmp_path / "notes", tmp_path / lock.LOCK
    notes.write_text("mine")
    path.symlink_to(notes)
    assert holder(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"\.lock"):
        Checkpointer(str(tmp_path)).lock()
    assert notes.read_text() == "mine"
    path.unlink()
    os.mkfifo(path)
    with StoreLock(tmp_path) as held:
        assert str(lock._read_owner(held._descriptor)) == "another process"


@pytest.mark.parametrize(
    ("folder", "umask", "left"),
    [
        (0o2775, 0o022, 0o664),
        (0o2755, 0o022, 0o644),
        (0o2775, 0o077, 0o600),
        (0o3775, 0o022, 0o644),
        (0o777, 0o022, 0o666),
        (0o1777, 0o022, 0o644),
    ],
)
def test_who_may_delete_the_lock_of_a_killed_run_may_take_it(
    tmp_path: Path, folder: int, umask: int, left: int
) -> None:
    tmp_path.chmod(folder)
    before = os.umask(umask)
    try:
        with StoreLock(tmp_path):
            assert (tmp_path / lock.LOCK).stat().st_mode & 0o777 == left
    finally:
        os.umask(before)


def test_the_lock_is_not_for_the_users_own_group_where_the_folder_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o775)
    own, stat_of = tmp_path.stat().st_gid, os.stat
    other = os.stat_result([*stat_of(tmp_path)[:5], own + 1, *stat_of(tmp_path)[6:10]])
    monkeypatch.setattr(os, "stat", lambda path, **how: other if path == str(tmp_path) else stat_of(path, **how))
    before = os.umask(0o022)
    try:
        with StoreLock(tmp_path):
            assert (tmp_path / lock.LOCK).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    for _ in range(2):
        with StoreLock(tmp_path), pytest.raises(CheckpointError, match="this process"):
            StoreLock(tmp_path)
    seen = [record.getMessage() for record in caplog.records]
    assert len(seen) == 1
    assert f"the file system of {tmp_path} does not support locks" in seen[0]
