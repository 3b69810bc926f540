"""In flight: memory handed out stays as it is until its reader lets go, and nobody waits for a reader who will not."""

from __future__ import annotations

import gc
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import torch

import stagereg.kernel.waiting as waiting
from stagereg import AsyncStager
from stagereg.errors import StagerClosedError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is not seen is given less time."""
    monkeypatch.setattr(waiting, "GRACE_S", 0.2)


def state(value: float, n: int = 5000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((n,), value), "v": torch.full((7,), value)}


def holds_only(copy: dict[str, torch.Tensor], value: float) -> bool:
    return all(x.eq(value).all() for x in copy.values())


def start_of(copy: dict[str, torch.Tensor]) -> int:
    return min(x.data_ptr() for x in copy.values())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "staged copies are still held" in r.getMessage()]


def test_the_second_stage_never_overwrites_what_is_held(stager: AsyncStager) -> None:
    source = state(0)
    held = []
    for step in range(6):
        for x in source.values():
            x.fill_(step)
        held.append(stager.stage(source))
    assert all(holds_only(copy, step) for step, copy in enumerate(held))


def test_kept_copies_never_block_and_are_told_once(make, caplog) -> None:
    stager = make(max_in_flight=2)
    kept = [stager.stage(state(step)) for step in range(7)]
    assert all(holds_only(copy, step) for step, copy in enumerate(kept))
    assert len(warnings(caplog)) == 1


def test_kept_copies_never_block_a_stage_on_another_thread(make, polls) -> None:
    stager = make(max_in_flight=1)
    kept = stager.stage(state(1))
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(stager.stage, state(2)).result(timeout=20)
    assert polls
    assert not any(polls)
    assert holds_only(kept, 1)
    assert holds_only(copy, 2)


def test_idle_threads_are_not_waited_for(make, polls) -> None:
    stager = make(max_in_flight=1)
    done = threading.Event()
    idle = threading.Thread(target=done.wait)
    idle.start()
    kept = [stager.stage(state(step)) for step in range(3)]
    done.set()
    idle.join()
    assert polls
    assert not any(polls)
    assert all(holds_only(copy, step) for step, copy in enumerate(kept))


def test_a_consumer_parked_at_its_queue_is_not_waited_for(make, polls) -> None:
    stager = make(max_in_flight=1)
    jobs: queue.Queue[dict[str, torch.Tensor] | None] = queue.Queue()
    taken = threading.Semaphore(0)

    def consume() -> None:
        while (job := jobs.get()) is not None:
            assert len(job) == 2
            taken.release()

    consumer = threading.Thread(target=consume)
    consumer.start()
    jobs.put(stager.stage(state(1)))
    taken.acquire()
    while not any(f.f_code is queue.Queue.get.__code__ for f in _stack_of(consumer)):
        taken.acquire(timeout=0.001)
    assert holds_only(stager.stage(state(2)), 2)
    jobs.put(None)
    consumer.join()
    assert polls
    assert not any(polls)


def _stack_of(thread: threading.Thread) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        yield frame
        frame = frame.f_back


Hold = Callable[[object], None]


def hold_directly(copy: dict[str, torch.Tensor], hold: Hold) -> None:
    hold(copy)


def hold_one_tensor(copy: dict[str, torch.Tensor], hold: Hold) -> None:
    w = copy.pop("w")
    copy.clear()
    hold(w)


def hold_in_a_list(copy: dict[str, torch.Tensor], hold: Hold) -> None:
    jobs = [("step", {"deep": [dict(copy)]})]
    copy.clear()
    hold(jobs)


@pytest.mark.parametrize("holder", [hold_directly, hold_one_tensor, hold_in_a_list])
def test_at_the_bound_stage_waits_for_the_writer_to_let_go(make, polls, caplog, holder) -> None:
    stager = make(max_in_flight=1)
    box = [stager.stage(state(1))]
    first_at = start_of(box[0])
    holding, let_go = threading.Event(), threading.Event()

    def hold(what: object) -> None:
        holding.set()
        assert let_go.wait(30)

    writer = threading.Thread(target=lambda: holder(box.pop(), hold))
    writer.start()
    assert holding.wait(30)
    polls.then[3] = let_go.set
    second = stager.stage(state(2))
    writer.join()
    assert polls[:3] == [True, True, True]
    assert not warnings(caplog)
    assert holds_only(second, 2)
    if type(stager).__name__ == "PinnedCachedStager":
        assert start_of(second) == first_at, "the memory let go is used again"


def test_a_writer_that_never_lets_go_is_waited_for_no_longer_than_wait_s(make, polls, caplog) -> None:
    stager = make(max_in_flight=1, wait_s=0.1)
    holding, done = threading.Event(), threading.Event()
    box = [stager.stage(state(1))]

    def write() -> None:
        copy = box.pop()
        holding.set()
        assert done.wait(30)
        assert holds_only(copy, 1)

    writer = threading.Thread(target=write)
    writer.start()
    assert holding.wait(30)
    assert holds_only(stager.stage(state(2)), 2)
    done.set()
    writer.join()
    assert all(polls)
    assert len(warnings(caplog)) == 1


def test_close_ends_the_wait_of_a_stage(make, polls) -> None:
    stager = make(max_in_flight=1)
    holding, done = threading.Event(), threading.Event()
    box = [stager.stage(state(1))]

    def write() -> None:
        copy = box.pop()
        holding.set()
        assert done.wait(30)
        del copy

    writer = threading.Thread(target=write)
    writer.start()
    assert holding.wait(30)
    asked = threading.Event()
    polls.then[1] = asked.set
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stager.stage, state(2))
        assert asked.wait(20)
        stager.close()
        with pytest.raises(StagerClosedError):
            waiting.result(timeout=20)
    done.set()
    writer.join()


def test_a_copy_in_a_dead_cycle_is_nobodys(make, caplog) -> None:
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
