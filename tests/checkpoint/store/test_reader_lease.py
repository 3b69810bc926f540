"""A checkpoint that somebody reads is not deleted before that has ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import stagereg.checkpoint.store.lease as lease
import stagereg.checkpoint.store.readers as readers
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Manifest, new_token
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store
from tests.support.installed import needs
from tests.support.places import PLACES, place
from tests.support.reading import opened

from ...support.watching import watching

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BOUND_S = 60
READ = """
import sys, time
from stagereg.checkpoint.store.open_store import open_store
with open_store(sys.argv[1]).readers.read_lease(sys.argv[1] + "/step-00000001"):
    print("reading", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=PLACES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpointer]:
    """A run that keeps one checkpoint, and has saved steps 1 and 2 of which it keeps both, in either kind of store."""
    dir = place(request.param, tmp_path)
    with Checkpointer(dir, keep=1, save_last=False) as checkpointer:
        save(checkpointer, 1)
        yield checkpointer
    if request.param == "url":
        fsspec.filesystem("memory").rm(dir.removeprefix("memory:/"), recursive=True)


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"x": torch.full((8,), float(step))})
    checkpointer.wait()
    checkpointer._background.finish()


def there(checkpointer: Checkpointer) -> list[int]:
    return sorted(each.manifest.step for each in open_store(str(checkpointer.dir)).checkpoints()[0])


def first(checkpointer: Checkpointer) -> str:
    return open_store(str(checkpointer.dir)).checkpoints()[0][-1].path


def leases(checkpointer: Checkpointer) -> list[str]:
    store = open_store(str(checkpointer.dir))
    return [name for name in store.backend.list(store.root) if name.startswith(".reading")]


def leave(checkpointer: Checkpointer, **changes: Any) -> str:
    """Write the lease of a reader on another machine, as it is when that does not go on."""
    store = open_store(str(checkpointer.dir))
    owner = {"pid": 1, "host": "far", "since": 0.0, "command": "evaluate.py"}
    path = f"{store.root}/{readers.reader_name(first(checkpointer).rpartition('/')[2])}"
    store.backend.write(
        path, json.dumps({"owner": owner, "token": "a", "machine": "other", "renewed": 0.0} | changes).encode()
    )
    return path


def test_what_is_read_stays_until_that_has_ended(run: Checkpointer) -> None:
    store = open_store(str(run.dir))
    seen: list[str] = []
    with store.readers.read_lease(first(run)):
        with store.readers.read_lease(first(run)):
            with watching(seen.append):
                save(run, 2)
            assert there(run) == [1, 2]
            assert len(leases(run)) == 2
            assert "hidden" not in seen  # it was there all the time
        save(run, 3)
        assert there(run) == [1, 3]
        assert store.look(first(run), content=True).damages == {}
    save(run, 4)
    assert (there(run), leases(run)) == ([4], [])


def test_a_reader_that_comes_at_the_last_moment_keeps_it(run: Checkpointer) -> None:
    store, path = open_store(str(run.dir)), first(run)
    with contextlib.ExitStack() as held:
        observer = lambda point: held.enter_context(store.readers.read_lease(path)) if point == "hidden" else None  # noqa: E731
        with watching(observer):
            save(run, 2)
        assert there(run) == [1, 2]
        assert store.look(path, content=True).damages == {}
    save(run, 3)
    assert there(run) == [3]


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """A store that nothing was saved to, of either kind."""
    return open_store(place(request.param, tmp_path))


def publish(store: CheckpointStore, *steps: int, keep: int, check: Callable[[], None] | None = None) -> list[int]:
    """Save steps of one file; ``check`` raises where the lock is lost. Return the steps that are listed then."""
    with store.lock():
        store.retention.check = check or store.retention.check
        for step in steps:
            written = store.temporary(step, new_token())
            if not store.backend.in_place:
                os.mkdir(written)
            store.publish(written, Manifest(step, 1, 0, {"a": store.put(written, "a", b"a")}), keep)
            store.retention.clear()
    return sorted(each.manifest.step for each in store.checkpoints()[0])


@pytest.mark.parametrize("most", [99, 3], ids=["all are hidden", "the lock is lost after three"])
def test_readers_that_come_while_many_are_hidden_keep_theirs(store: CheckpointStore, most: int) -> None:
    publish(store, *range(1, 6), keep=9)
    hidden: list[str] = []

    def come(point: str) -> None:
        if point == "hidden":
            hidden.append(point)
            for each in paths if len(hidden) == 1 else ():
                held.enter_context(store.readers.read_lease(each))

    def lose() -> None:
        if len(hidden) >= most:
            raise OSError("the lock is lost")

    paths = [each.path for each in store.checkpoints()[0] if each.manifest.step in (2, 3)]
    with contextlib.ExitStack() as held:
        with watching(come):
            left = publish(store, 6, keep=1, check=lose)
        assert len(hidden) >= min(5, most)
        assert {2, 3, 6} <= {*left}
        assert len(left) == 3 or most == 3
        assert [store.look(each, content=True).damages for each in paths] == [{}, {}]
    assert publish(store, 7, keep=1) == [7]
    assert store.leftovers() == []


def test_a_listing_that_fails_once_leaves_nothing_hidden(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1, 2, keep=2)
    look, looks = store.readers.found, []

    def fail(*given: bool, **named: bool) -> Any:
        looks.append(given)
        if len(looks) == 2:
            raise OSError(5, "Input/output error")
        return look(*given, **named)

    monkeypatch.setattr(store.readers, "found", fail)
    assert publish(store, 3, keep=1) == [3]
    assert publish(store, 4, keep=1) == [4]
    assert (len(looks), store.leftovers()) == (4, [])


def test_a_save_lists_the_directory_as_often_whether_few_or_many_checkpoints_go(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    look = store.backend.list
    monkeypatch.setattr(store.backend, "list", lambda path, *files: listed.append(path) or look(path, *files))
    counts = []
    for few in (2, 20):
        publish(store, *range(100 * few, 101 * few), keep=99)
        listed.clear()
        assert publish(store, 101 * few, keep=1) == [101 * few]
        counts.append(listed.count(store.root))
    assert counts[0] == counts[1] < 10


def test_a_killed_reader_of_this_machine_keeps_nothing(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), keep=1, save_last=False) as run:
        save(run, 1)
        command = [sys.executable, "-c", READ, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "reading\n"
                save(run, 2)
                assert there(run) == [1, 2]
            finally:
                reader.send_signal(signal.SIGKILL)
        save(run, 3)
        assert (there(run), leases(run)) == ([3], [])


@pytest.mark.parametrize("renewed", [0.0, 4e9], ids=["clock behind", "clock ahead"])
def test_a_reader_lost_elsewhere_counts_for_a_minute(
    run: Checkpointer, monkeypatch: pytest.MonkeyPatch, renewed: float
) -> None:
    leave(run, renewed=renewed)
    save(run, 2)
    save(run, 3)
    assert there(run) == [1, 3]
    monkeypatch.setattr(readers, "LEASE_S", -1.0)
    save(run, 4)
    assert (there(run), leases(run)) == ([4], [])


@pytest.mark.parametrize("content", [b"", b"{", b'{"owner": 7}', b"\xff" * 9])
def test_what_cannot_be_read_of_a_lease_counts_as_one(
    run: Checkpointer, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    open_store(str(run.dir)).backend.write(leave(run), content)
    save(run, 2)
    assert there(run) == [1, 2]
    monkeypatch.setattr(readers, "LEASE_S", -1.0)
    save(run, 3)
    assert (there(run), leases(run)) == ([3], [])


def test_a_lease_is_renewed_and_then_deleted(run: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.03)
    store, seen = open_store(str(run.dir)), set()
    with store.readers.read_lease(first(run)):
        ends = time.monotonic() + BOUND_S
        while len(seen) < 3 and time.monotonic() < ends:
            seen |= {record.renewed for records in store.readers.found().values() for record in records}
        assert len(seen) >= 3
    while any(thread.name == "stagereg-reading" for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert leases(run) == []
    assert [thread for thread in threading.enumerate() if thread.name == "stagereg-reading"] == []


def test_a_forked_child_leaves_the_lease_alone(run: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(AssertionError), open_store(str(run.dir)).readers.read_lease(first(run)):
        monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.undo()
    assert len(leases(run)) == 1


def test_who_may_not_write_reads_without_a_lease(
    run: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    readers._log_without.cache_clear()

    def refuse(path: str, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    store = open_store(str(run.dir))
    monkeypatch.setattr(type(store.backend), "write", lambda _, path, data: refuse(path, data))
    with caplog.at_level(logging.DEBUG, "stagereg"):
        for _ in range(3):
            with store.readers.read_lease(first(run)):
                assert store.look(first(run), content=True).damages == {}
            with opened(str(run.dir), verify=True) as checkpoint:
                assert checkpoint.entry("x").sum() == 8
    said = [each for each in caplog.records if "without a lease" in each.getMessage()]
    assert [(each.levelname, "Permission denied" in each.getMessage()) for each in said] == [("DEBUG", True)]
    assert leases(run) == []


def while_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call ``act`` when the content of a checkpoint is first read."""
    read, acted = CheckpointStore.contents, []

    def contents(store: CheckpointStore, path: str, parts: Any) -> Any:
        if not acted:
            acted.append(path)
            act()
        return read(store, path, parts)

    monkeypatch.setattr(CheckpointStore, "contents", contents)


@pytest.mark.parametrize(
    "command", ["verify DIR", "ls DIR --verify", pytest.param("convert DIR OUT.pt", marks=needs("interop"))]
)
def test_commands_that_read_keep_what_they_read(
    run: Checkpointer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    seen: list[list[int]] = []

    def go_on() -> None:
        save(run, 2)
        seen.append(there(run))

    while_read(monkeypatch, go_on)
    given = command.replace("DIR", str(run.dir)).replace("OUT", str(tmp_path / "out"))
    assert cli.main(given.split()) == 0
    assert seen == [[1, 2]]
    save(run, 3)
    assert (there(run), leases(run)) == ([3], [])


def test_a_restore_of_another_job_keeps_what_it_reads(run: Checkpointer, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Model:
        def state_dict(self) -> dict[str, int]:
            return {"weight": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            run.save(8, {"model": Model()})
            run.wait()
            seen.append(there(run))

    run.save(7, {"model": Model()})
    run.wait()
    with Checkpointer(str(tmp_path / "other"), save_last=False) as other:
        assert other.restore({"model": Model()}, str(run.dir)) == 7
    assert (seen, leases(run)) == ([[7, 8]], [])
