"""In flight: leased memory is not written until its reader drops it, and no reader is waited for beyond the limit."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import stagereg.kernel.memory as memory
from stagereg.errors import StagerClosedError, StagingError

from ..support.states import plain_state as state


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that promises nothing is given less time."""
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 0.1)


def holds_only(copy: dict[str, torch.Tensor], value: float) -> bool:
    return all(x.eq(value).all() for x in copy.values())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "staged copies are still held" in r.getMessage()]


def test_kept_copies_are_waited_for_once_and_logged_once(make, monkeypatch, caplog) -> None:
    stager = make(max_in_flight=2)
    kept = [stager.stage(state(step)) for step in range(3)]
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 1000.0)
    kept += [stager.stage(state(step)) for step in range(3, 7)]
    assert all(holds_only(copy, step) for step, copy in enumerate(kept))
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("releases", [False, True], ids=["drops", "releases"])
def test_at_the_bound_stage_waits_until_a_copy_is_let_go(make, waits, caplog, monkeypatch, releases: bool) -> None:
    stager = make(max_in_flight=1)
    if releases:
        stager.expect_release()
        monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 0.0)
    collections: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(None))
    staged = stager.stage(state(1))
    first_at = min(x.data_ptr() for x in staged.values())
    held: list[Any] = [staged if releases else {"one tensor": [staged["w"]]}]
    del staged

    def let_go() -> None:
        assert waits.began.wait(30)
        if releases:
            stager.release(held[0])
        held.clear()

    reader = threading.Thread(target=let_go)
    reader.start()
    second = stager.stage(state(2))
    reader.join()
    assert waits.count == 1
    assert not collections or not releases, "training waits for no collection of garbage"
    assert not warnings(caplog)
    assert holds_only(second, 2)
    if type(stager).__name__ == "PinnedCachedStager":
        assert min(x.data_ptr() for x in second.values()) == first_at, "the memory let go is used again"


def test_a_reader_that_will_release_is_waited_for_at_most_wait_s(make, waits, caplog) -> None:
    stager = make(max_in_flight=1, wait_s=0.1)
    stager.expect_release()
    kept = stager.stage(state(1))
    assert holds_only(stager.stage(state(2)), 2)
    assert holds_only(kept, 1)
    assert waits.count == 1
    assert len(warnings(caplog)) == 1


def test_close_ends_the_wait_of_a_stage(make, waits) -> None:
    stager = make(max_in_flight=1)
    kept = stager.stage(state(1))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(stager.stage, state(2))
        assert waits.began.wait(20)
        stager.close()
        with pytest.raises(StagerClosedError):
            second.result(timeout=20)
    assert holds_only(kept, 1)


@pytest.mark.parametrize("releases", [False, True], ids=["drops", "releases"])
def test_a_copy_in_a_dead_cycle_is_not_waited_for(make, caplog, releases: bool) -> None:
    stager = make(max_in_flight=1, wait_s=0.2)
    if releases:
        stager.expect_release()
    gc.disable()
    try:
        for step in range(3):
            cycle = [stager.stage(state(step))]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()
    assert not warnings(caplog)


@pytest.mark.parametrize("wrong", [{"max_in_flight": 0}, {"threads": 0}])
def test_a_senseless_argument_is_refused_by_name(make, wrong: dict[str, int]) -> None:
    with pytest.raises(StagingError, match=next(iter(wrong))):
        make(**wrong)
