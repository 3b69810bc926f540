"""The lease of an object store.

One run holds it, others are refused with its name, and a lease whose owner has died is taken over.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import pytest
import torch

import stagereg.checkpoint.store.lease as lease
import stagereg.checkpoint.store.retry as retry
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.store.lease import StoreLease, leaseholder
from stagereg.checkpoint.store.object_store import ObjectStore
from stagereg.errors import CheckpointError

BOUND_S = 30


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}/runs"


class Store(ObjectStore):
    """A store whose writes of the lease can be observed, changed or refused."""

    conditional = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.puts: list[str] = []
        self.written = threading.Event()
        self.reads = 0

    def get(self, url: str) -> bytes:
        self.reads += 1
        self.read(url)
        return super().get(url)

    def read(self, url: str) -> None:
        """Before each reading."""

    def put(self, url: str, data: bytes) -> None:
        super().put(url, data)
        self.puts.append(json.loads(data)["token"])
        self.written.set()

    def create(self, url: str, data: bytes) -> bool:
        if not self.conditional:
            raise NotImplementedError
        return super().create(url, data)


def note(**changes: Any) -> bytes:
    owner = {"pid": 4242, "host": "far", "since": time.time(), "command": "python train.py"}
    seen = {"owner": owner, "token": "theirs", "machine": "far", "renewed": time.time()}
    return json.dumps({**seen, **changes}).encode()


def content(store: ObjectStore, root: str) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(store.get(f"{root}/.lock"))
    return seen


def held(store: ObjectStore, root: str) -> StoreLease:
    return StoreLease(store, root, settle=0.0)


def test_a_second_checkpointer_is_refused_until_the_first_is_closed(root: str) -> None:
    first = Checkpointer(root)
    with pytest.raises(CheckpointError, match=r"another Checkpointer of this process; close\(\)"):
        Checkpointer(root)
    first.close()
    with Checkpointer(root) as second:
        second.save(1, {"x": torch.ones(2)})
        owner = leaseholder(ObjectStore(root), root)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert leaseholder(ObjectStore(root), root) is None


def test_an_owner_that_renews_its_lease_keeps_it_and_is_named(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_LOOK_S", 0.0)
    store = Store(root)
    ObjectStore.put(store, f"{root}/.lock", note())

    def renewed(url: str) -> None:
        if store.reads == 3:
            ObjectStore.put(store, url, note(renewed=time.time() + 1))

    store.read = renewed  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"in use.*process 4242 on far.*python train.py"):
        held(store, root)
    assert store.puts == []
    assert content(store, root)["token"] == "theirs"


def test_a_lease_that_close_could_not_delete_does_not_block_its_own_process(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: ObjectStore, url: str) -> None:
        raise OSError("the store is away")

    first = Checkpointer(root)
    with monkeypatch.context() as away:
        away.setattr(ObjectStore, "delete", gone)
        first.close()
    assert content(ObjectStore(root), root)["owner"]["pid"] == os.getpid()
    assert leaseholder(ObjectStore(root), root) is None
    held(Store(root), root).release()


@pytest.mark.parametrize(
    "left",
    [
        "expired",
        "of a dead process here",
        "not ours",
        "nested",
        "of no machine",
        "of no date",
        "at no time",
        "unchanged for long",
    ],
)
def test_the_lease_of_a_dead_run_is_taken_over(root: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(BOUND_S)
    dead = {"pid": gone.pid, "host": "here", "since": 0.0, "command": ""}
    texts = {
        "expired": note(renewed=time.time() - 61),
        "of a dead process here": note(owner=dead, machine=lease._machine()),
        "not ours": b"[]",
        "nested": b"[" * 100_000,
        "of no machine": note(owner={**dead, "host": 3}),
        "of no date": note(owner={**dead, "since": 1e300}),
        "at no time": note(renewed=float("nan")),
        "unchanged for long": note(renewed=time.time() + 9999),  # a clock that is ahead
    }
    monkeypatch.setattr(lease, "_LOOK_S", 0.0)
    store = Store(root)
    ObjectStore.put(store, f"{root}/.lock", texts[left])
    seconds = 0.05 if left == "unchanged for long" else 60.0
    with StoreLease(store, root, seconds, settle=0.0) as hold:
        hold.check()
        assert content(store, root)["owner"]["pid"] == os.getpid()
    assert not store.exists(f"{root}/.lock")


def test_of_two_runs_that_take_over_at_once_the_second_holds_it_and_the_first_waits(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_LOOK_S", 0.0)
    store = Store(root)
    ObjectStore.put(store, f"{root}/.lock", note(renewed=0.0))

    def overtaken(url: str) -> None:
        if store.puts:
            ObjectStore.put(store, url, note(renewed=time.time() + store.reads))

    store.read = overtaken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="process 4242"):
        held(store, root)
    assert len(store.puts) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_fails_once_is_asked_again(root: str, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    monkeypatch.setattr(retry, "FIRST_S", 0.0)
    store = Store(root)
    create, failed = store.create, []

    def fail(url: str, data: bytes) -> bool:
        if not failed:
            failed.append(lost and create(url, data))
            raise ConnectionError("lost")
        return create(url, data)

    store.create = fail  # type: ignore[method-assign]
    with held(store, root) as hold:
        hold.check()
    assert failed == [lost]


def test_a_lock_that_can_neither_be_made_nor_read_is_reported(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_LOOK_S", 0.0)
    store = Store(root)
    store.create = lambda url, data: False  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"\.lock can neither be made nor read"):
        StoreLease(store, root, seconds=0.05)


def test_a_store_without_conditional_writes_is_held_as_well(root: str) -> None:
    store = Store(root)
    store.conditional = False
    with held(store, root) as hold:
        hold.check()
        with pytest.raises(CheckpointError, match="this process"):
            held(store, root)


def test_it_is_renewed_while_it_is_held_and_no_longer(root: str) -> None:
    store = Store(root)
    hold = StoreLease(store, root, seconds=0.3, settle=0.0)
    first = content(store, root)["renewed"]
    assert store.written.wait(BOUND_S)
    assert content(store, root)["renewed"] > first
    hold.release()
    hold._thread.join(BOUND_S)
    assert not hold._thread.is_alive()
    assert not store.exists(f"{root}/.lock")
    with pytest.raises(CheckpointError, match="let go"):
        hold.check()


def test_a_deleted_lease_is_made_again_and_reported(root: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(root)
    with held(store, root) as hold:
        store.delete(f"{root}/.lock")
        with caplog.at_level(logging.WARNING):
            hold.check()
        assert "was deleted while this run held it" in caplog.text
        assert content(store, root)["owner"]["pid"] == os.getpid()


def test_a_lease_that_was_taken_over_fails_the_save_and_is_not_changed(root: str) -> None:
    checkpointer = Checkpointer(root)
    store = ObjectStore(root)
    store.put(f"{root}/.lock", note())
    checkpointer.save(1, {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"taken over while this run had it, by process 4242 on far"):
        checkpointer.close()
    assert content(store, root)["token"] == "theirs"
    assert checkpointer.latest is None
