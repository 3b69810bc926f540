"""Where the store of a run is gone with its machine, those left meet in another one, if they are half of all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

import stagereg.launch.stand_by as stand_by
from stagereg.errors import LaunchError
from stagereg.launch.run_store import RunStore
from stagereg.launch.stand_by import StandBy

SIZE = 4
LIMIT_S = 1.0


def hang() -> None:
    threading.Event().wait(30)


def fail() -> None:
    raise DistNetworkError("Connection refused")


class RunsStore(HashStore):
    """That of a run, which cannot be reached any more by another connection."""

    def __init__(self) -> None:
        super().__init__()
        self.clone: Callable[[], Any] = fail


def runs(monkeypatch: pytest.MonkeyPatch, here: bool = False) -> list[RunStore]:
    """The store as each rank has it, on several machines unless it is ``here``."""
    monkeypatch.setattr(stand_by, "is_here", lambda host: here)
    store = RunsStore()
    found = [RunStore(store, rank, SIZE) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        made = pool.map(lambda rank: StandBy(store, rank, SIZE), range(SIZE))
    for run, each in zip(found, made, strict=True):
        run._store, run._stand_by = store, each
    return found


def meet(left: list[RunStore]) -> list[Future[Any]]:
    with ThreadPoolExecutor(SIZE) as pool:
        return [pool.submit(run.meet, LIMIT_S) for run in left]


@pytest.mark.parametrize("lost", [hang, fail])
def test_half_of_the_ranks_meet_and_know_what_all_have_reported(monkeypatch: pytest.MonkeyPatch, lost: Any) -> None:
    found = runs(monkeypatch)
    for rank, run in enumerate(found):
        run.set(f"kinds/{rank}", rank)
        run._store.clone = lost
    first, second = (each.result() for each in meet(found[2:]))
    assert [first.get(f"kinds/{rank}") for rank in range(SIZE)] == [b"0", b"1", b"2", b"3"]
    assert first.compare_set("decided", "", "a") == second.compare_set("decided", "", "b") == b"a"


def test_fewer_than_half_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = runs(monkeypatch)
    [one] = meet(found[3:])
    with pytest.raises(LaunchError, match="is gone, and fewer than half of the ranks have come to the stand-by one"):
        one.result()


def test_one_machine_has_no_stand_by_store(monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = meet(runs(monkeypatch, here=True)[:1])
    with pytest.raises(LaunchError, match=r"^the store of this run, with its machine, is gone\.$"):
        one.result()


def test_the_store_of_the_run_is_taken_where_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = runs(monkeypatch)
    found[0]._store.clone = lambda: found[0]._store
    [one] = meet(found[:1])
    assert one.result() is found[0]._store
