"""The lease of an object store is renewed by its owner, and that of a dead run is taken over."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import stagereg.checkpoint.store.lease as leases
import stagereg.extensions.buckets.lease as lease
import stagereg.extensions.buckets.retry as retry
from stagereg.assembly import Checkpointer
from stagereg.base.machine import machine_name
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.lease import StoreLease, leaseholder
from stagereg.extensions.buckets.object_store import ObjectStore

from ...support.programs import comes_true

BOUND_S = 30


class Store(ObjectStore):
    """A store whose writes of the lease can be observed, changed or refused."""

    conditional = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root
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
        if url.endswith("/.lock"):
            self.puts.append(json.loads(data)["token"])
            self.written.set()

    def create(self, url: str, data: bytes) -> bool:
        if not self.conditional:
            raise NotImplementedError
        return super().create(url, data)

    def lay(self, content: bytes, ago_s: float = 0.0) -> None:
        url = f"{self.root}/.lock"
        super().put(url, content)
        self.fs.store[self.path(url)].modified -= timedelta(seconds=ago_s)

    def content(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(super().get(f"{self.root}/.lock"))
        return seen

    def lease(self) -> StoreLease:
        return StoreLease(self, self.root)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(StoreLease, "_look_s", 0.0)
    monkeypatch.setattr(lease, "_SETTLE_S", 0.0)
    monkeypatch.setattr(retry, "FIRST_S", 0.0)
    return Store(f"memory://{uuid.uuid4().hex}/runs")


OWNER = {"pid": 4242, "host": "far", "since": 0.0, "command": "python train.py"}


def note(**changes: Any) -> bytes:
    seen = {"owner": OWNER, "token": "theirs", "renewed": time.time()}
    return json.dumps({**seen, **changes}).encode()


def test_an_owner_that_renews_its_lease_keeps_it_and_is_named(store: Store) -> None:
    store.lay(note())

    def renewed(url: str) -> None:
        if store.reads == 3:
            store.lay(note(renewed=time.time() + 1))

    store.read = renewed  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"in use.*process 4242 on far.*python train.py"):
        store.lease()
    assert store.puts == []
    assert store.content()["token"] == "theirs"


def near(pid: int) -> bytes:
    return note(machine=machine_name(), owner={**OWNER, "pid": pid})


def test_an_owner_that_lives_on_this_machine_is_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOCK_TIMEOUT_S", 0.0)
    store.lay(near(os.getppid()))
    with pytest.raises(CheckpointError, match=f"in use.*process {os.getppid()} on far"):
        store.lease()
    assert store.content()["token"] == "theirs"


@pytest.mark.parametrize(
    ("left", "ago_s"),
    [
        (note(renewed=0.0), 61),
        (near(1 << 23), 0),
        (b"[]", 0),
        (b"[" * 100_000, 0),
        (note(owner={**OWNER, "host": 3}), 0),
        (note(renewed=float("nan")), 0),
    ],
    ids=["expired", "ended on this machine", "not ours", "nested", "of no machine", "at no time"],
)
def test_the_lease_of_a_dead_run_is_taken_over(store: Store, left: bytes, ago_s: float) -> None:
    store.lay(left, ago_s)
    assert leaseholder(store, store.root) is None
    with store.lease() as hold:
        hold.check()
        assert store.content()["owner"]["pid"] == os.getpid()
    assert store.listing(store.root) == {}


@pytest.mark.parametrize("clock_s", [-9999, 0, 9999])
def test_a_lease_is_as_old_as_the_store_says_whatever_the_clock_of_its_owner(store: Store, clock_s: int) -> None:
    store.lay(note(renewed=time.time() + clock_s), ago_s=61)
    with store.lease():
        assert store.reads < 10  # it was not waited for
        assert store.content()["owner"]["pid"] == os.getpid()
    assert store.listing(store.root) == {}
    store.lay(note(renewed=time.time() + clock_s), ago_s=30)

    def renewed(url: str) -> None:
        if store.reads > 5:
            store.lay(note())

    store.reads, store.read = 0, renewed  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="in use"):
        store.lease()


@pytest.mark.parametrize("ahead_s", [0, 9999])
def test_where_the_store_has_no_clock_a_lease_is_watched(
    store: Store, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.2)
    monkeypatch.setattr(store.fs, "modified", mock.Mock(side_effect=NotImplementedError))
    store.lay(note(renewed=time.time() + ahead_s), ago_s=9999)
    began = time.monotonic()
    with store.lease():
        assert store.content()["owner"]["pid"] == os.getpid()
    assert time.monotonic() >= began + leases.LEASE_S


def test_of_two_that_take_over_at_once_the_second_holds_it(store: Store) -> None:
    store.lay(note(renewed=0.0), ago_s=61)

    def overtaken(url: str) -> None:
        if store.puts:
            store.lay(note(renewed=time.time() + store.reads))

    store.read = overtaken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="process 4242"):
        store.lease()
    assert len(store.puts) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_fails_once_is_asked_again(store: Store, lost: bool) -> None:
    create, failed = store.create, []

    def fail(url: str, data: bytes) -> bool:
        if not failed:
            failed.append(lost and create(url, data))
            raise ConnectionError("lost")
        return create(url, data)

    store.create = fail  # type: ignore[method-assign]
    with store.lease() as hold:
        hold.check()
    assert failed == [lost]


def test_a_lease_that_can_neither_be_made_nor_read_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.05)
    store.create = lambda url, data: False  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"\.lock can be neither created nor read"):
        store.lease()


def test_a_store_without_conditional_writes_is_held_as_well(store: Store) -> None:
    store.conditional = False
    with store.lease() as hold:
        hold.check()
        with pytest.raises(CheckpointError, match="this process"):
            store.lease()


def test_it_is_renewed_while_it_is_held_and_no_longer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.3)
    hold = store.lease()
    first = store.content()["renewed"]
    assert store.written.wait(BOUND_S)
    assert store.content()["renewed"] > first
    hold.release()
    assert comes_true(lambda: all(each.name != "stagereg-lease" for each in threading.enumerate()), BOUND_S)
    assert store.listing(store.root) == {}
    ended = mock.Mock(**{"wait.return_value": True})
    leases._keep(mock.Mock(), ended, 0)
    assert ended.wait.call_args.args[0] <= leases.LEASE_S / 2  # one that is late is not over yet


def test_a_lease_that_was_taken_over_fails_the_save_and_stays(store: Store) -> None:
    checkpointer = Checkpointer(store.root)
    checkpointer.lock()
    store.lay(note())
    checkpointer.save(1, {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"process 4242 on far.* has taken the lock of .* from this run"):
        checkpointer.close()
    assert store.content()["token"] == "theirs"
    assert checkpointer.latest is None
