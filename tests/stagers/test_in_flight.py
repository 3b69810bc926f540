"""In flight: leased memory is not written until its reader drops it, and no reader is waited for beyond the limit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import stagereg.kernel.memory as memory
from stagereg.errors import StagerClosedError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that promises nothing is given less time."""
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 0.1)


def state(value: float, n: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((n,), value), "v": torch.full((7,), value)}


def holds_only(copy: dict[str, torch.Tensor], value: float) -> bool:
    return all(x.eq(value).all() for x in copy.values())


def start_of(copy: dict[str, torch.Tensor]) -> int:
    return min(x.data_ptr() for x in copy.values())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "staged copies are still held" in r.getMessage()]


def test_kept_copies_are_waited_for_once_and_logged_once(make, monkeypatch, caplog) -> None:
    stager = make(max_in_flight=2)
    kept = [stager.stage(state(step)) for step in range(3)]
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 1000.0)
    kept += [stager.stage(state(step)) for step in range(3, 7)]
    assert all(holds_only(copy, step) for step, copy in enumerate(kept))
    assert len(warnings(caplog)) == 1


def test_kept_copies_never_block_a_stage_on_another_thread(make) -> None:
    stager = make(max_in_flight=1)
    kept = stager.stage(state(1))
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(stager.stage, state(2)).result(timeout=20)
    assert holds_only(kept, 1)
    assert holds_only(copy, 2)


HOLDERS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "the copy": lambda copy: copy,
    "one tensor": lambda copy: copy["w"],
    "in a list": lambda copy: [("step", {"deep": [dict(copy)]})],
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_at_the_bound_stage_waits_for_a_copy_to_be_dropped(make, waits, caplog, holder) -> None:
    stager = make(max_in_flight=1)
    box = [stager.stage(state(1))]
    first_at = start_of(box[0])
    holding = threading.Event()

    def read() -> None:
        held = holder(box.pop())
        holding.set()
        assert waits.began.wait(30)
        del held

    reader = threading.Thread(target=read)
    reader.start()
    assert holding.wait(30)
    second = stager.stage(state(2))
    reader.join()
    assert waits.count == 1
    assert not warnings(caplog)
    assert holds_only(second, 2)
    if type(stager).__name__ == "PinnedCachedStager":
        assert start_of(second) == first_at, "the memory let go is used again"


def test_a_reader_that_will_release_is_waited_for_at_most_wait_s(make, waits, caplog) -> None:
    stager = make(max_in_flight=1, wait_s=0.1)
    stager.expect_release()
    kept = stager.stage(state(1))
    assert holds_only(stager.stage(state(2)), 2)
    assert holds_only(kept, 1)
    assert waits.count == 1
    assert len(warnings(caplog)) == 1


def test_a_reader_that_will_release_is_waited_for_until_it_does(make, waits, caplog, monkeypatch) -> None:
    stager = make(max_in_flight=1, wait_s=30.0)
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 0.0)
    stager.expect_release()
    staged = stager.stage(state(1))

    def write() -> None:
        assert waits.began.wait(30)
        stager.release(staged)

    reader = threading.Thread(target=write)
    reader.start()
    assert holds_only(stager.stage(state(2)), 2)
    reader.join()
    assert staged == {}
    assert waits.count == 1
    assert not warnings(caplog)


def test_a_released_copy_is_not_waited_for_and_its_parts_stay(make, waits, caplog) -> None:
    stager = make(max_in_flight=1)
    stager.expect_release()
    held = []
    for _ in range(4):
        staged = stager.stage(state(1))
        held.append(staged["w"][10:20])
        stager.release(staged)
        assert staged == {}
    later = stager.stage(state(2))
    assert waits.count == 0
    assert not warnings(caplog)
    assert all(part.eq(1).all() for part in held)
    assert holds_only(later, 2)


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


def test_a_copy_in_a_dead_cycle_is_not_waited_for(make, caplog) -> None:
    stager = make(max_in_flight=1)
    gc.disable()
    try:
        for step in range(3):
            cycle = [stager.stage(state(step))]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()
    assert not warnings(caplog)
