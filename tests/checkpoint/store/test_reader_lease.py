"""A checkpoint that somebody reads is not deleted before that has ended."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import stagereg
import stagereg.checkpoint.store.lease as lease
import stagereg.checkpoint.store.readers as readers
from stagereg import cli
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Leave
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store

from ...support.watching import watching

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BOUND_S = 60
READ = """
import sys, time
from stagereg.checkpoint.store.open_store import open_store
with open_store(sys.argv[1]).readers.reading(sys.argv[1] + "/step-00000001"):
    print("reading", flush=True)
    time.sleep(600)
"""


@pytest.fixture(params=["path", "url"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpointer]:
    """A run that keeps one checkpoint, and has saved steps 1 and 2 of which it keeps both, in either kind of store."""
    dir = str(tmp_path / "run") if request.param == "path" else f"memory://{uuid.uuid4().hex}/run"
    with Checkpointer(dir, keep=1, leave=Leave(save_last=False)) as checkpointer:
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
    with store.readers.reading(first(run)):
        with store.readers.reading(first(run)):
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
        observer = lambda point: held.enter_context(store.readers.reading(path)) if point == "hidden" else None  # noqa: E731
        with watching(observer):
            save(run, 2)
        assert there(run) == [1, 2]
        assert store.look(path, content=True).damages == {}
    save(run, 3)
    assert there(run) == [3]


def test_a_killed_reader_of_this_machine_keeps_nothing(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), keep=1, leave=Leave(save_last=False)) as run:
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
    with store.readers.reading(first(run)):
        ends = time.monotonic() + BOUND_S
        while len(seen) < 3 and time.monotonic() < ends:
            seen |= {record.renewed for records in store.readers.found().values() for record in records}
        assert len(seen) >= 3
    while any(thread.name == "stagereg-reading" for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert leases(run) == []
    assert [thread for thread in threading.enumerate() if thread.name == "stagereg-reading"] == []


def test_a_forked_child_leaves_the_lease_alone(run: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(AssertionError), open_store(str(run.dir)).readers.reading(first(run)):
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
            with store.readers.reading(first(run)):
                assert store.look(first(run), content=True).damages == {}
            with stagereg.open_checkpoint(str(run.dir), verify=True) as checkpoint:
                assert checkpoint.entry("x").sum() == 8
    said = [each for each in caplog.records if "without a lease" in each.getMessage()]
    assert [(each.levelname, "Permission denied" in each.getMessage()) for each in said] == [("DEBUG", True)]
    assert leases(run) == []


def test_an_open_checkpoint_that_is_forgotten_is_let_go(run: Checkpointer) -> None:
    checkpoint = stagereg.open_checkpoint(str(run.dir))
    assert len(leases(run)) == 1
    del checkpoint
    gc.collect()
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


@pytest.mark.parametrize("command", ["verify DIR", "ls DIR --verify", "convert DIR OUT.pt"])
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
    with Checkpointer(str(tmp_path / "other"), leave=Leave(save_last=False)) as other:
        assert other.restore({"model": Model()}, str(run.dir)) == 7
    assert (seen, leases(run)) == ([[7, 8]], [])
