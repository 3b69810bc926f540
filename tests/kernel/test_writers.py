"""Who counts as a writer at work, and that looking for one changes nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stagereg.kernel.memory import Pool
from stagereg.kernel.writers import writer_at_work


def block_of(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.untyped_storage().nbytes()


@contextlib.contextmanager
def running(work: Callable[[threading.Event, threading.Event], None]) -> Iterator[Callable[[], None]]:
    """Run ``work(ready, go)`` on a thread until it says that it is ready; yields what lets it go on to its end."""
    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(ready, go))
    thread.start()
    assert ready.wait(20)

    def finish() -> None:
        go.set()
        thread.join(20)

    try:
        yield finish
    finally:
        finish()


class Box:
    def __init__(self, x: object) -> None:
        self.x = x


SEEN = {
    "tensor": lambda x: x,
    "slice": lambda x: x[4:],
    "dict": lambda x: {"m": {"w": x}},
    "tuple in a list": lambda x: [(1, x)],
    "parameter": lambda x: torch.nn.Parameter(x),
    "behind other things": lambda x: {"args": {str(i): i for i in range(200)}, "w": [x]},
}
NOT_SEEN = {
    "another tensor": lambda x: x.clone(),
    "an object": Box,
    "nothing": lambda x: None,
}


@pytest.mark.parametrize(("kind", "seen"), [(k, True) for k in SEEN] + [(k, False) for k in NOT_SEEN])
def test_what_is_seen_behind_a_variable(kind: str, seen: bool) -> None:
    x = torch.ones(8)
    block = block_of(x)
    made = [{**SEEN, **NOT_SEEN}[kind](x)]

    def work(ready: threading.Event, go: threading.Event) -> None:
        held = made.pop()
        ready.set()
        assert go.wait(20)
        del held

    with running(work) as finish:
        assert writer_at_work([block]) is seen
        assert writer_at_work([(block[0], 0)]) is False
        finish()
        assert writer_at_work([block]) is False


def test_the_callers_and_the_main_threads_variables_do_not_count() -> None:
    x = torch.ones(8)
    answers = []

    def ask() -> None:
        mine = x
        answers.append(writer_at_work([block_of(mine)]))

    ask()
    thread = threading.Thread(target=lambda: answers.append(writer_at_work([block])))
    block = block_of(x)
    thread.start()
    thread.join()
    assert answers == [False, False]


def test_looking_does_not_prolong_a_loan() -> None:
    pool = Pool()
    made = [torch.frombuffer(pool.borrow(64).view, dtype=torch.float32)]
    block = block_of(made[0])
    dropped = threading.Event()

    def work(ready: threading.Event, go: threading.Event) -> None:
        held = made.pop()
        ready.set()
        assert look.wait(20)
        del held
        dropped.set()
        assert go.wait(20)

    look = threading.Event()
    with running(work):
        assert writer_at_work([block])
        look.set()
        assert dropped.wait(20)
        assert pool.in_flight == 0, "the function still runs, but has let go"


def test_looking_keeps_nothing_of_the_caller_alive() -> None:
    def ask() -> weakref.ref[Box]:
        mine = Box(None)
        assert not writer_at_work([(0, 1)])
        return weakref.ref(mine)

    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ask).result()() is None
        assert ask()() is None
    finally:
        gc.enable()


def test_looking_takes_no_variable_away() -> None:
    x = torch.ones(8)
    block = block_of(x)
    made, sums = [x], []
    del x

    def work(ready: threading.Event, go: threading.Event) -> None:
        held = made.pop()
        other = held * 2
        ready.set()
        assert go.wait(20)
        sums.append((held + other).sum().item())

    with running(work) as finish:
        for _ in range(5):
            assert writer_at_work([block])
        finish()
    assert sums == [24.0]
