"""The stagers that keep the contract, and a view on their waiting."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stagereg.kernel.memory as memory
from stagereg import AsyncStager, BlockingAsyncStager
from stagereg.stagers.deferred_copy import DeferredCopy
from stagereg.stagers.overlapped import OverlappedStager

from ..support.states import KINDS, build, settled

WAIT_S = 30.0


class Settled(AsyncStager):
    """A stager that promises a copy, seen as one that waits for it."""

    _synchronize_after_execute = False

    def __init__(self, owns_all: bool = False, **options: Any) -> None:
        self._promising = build("overlapped", **options)
        if owns_all:  # as if an optimizer wrote all there is, so that everything is copied in the background
            self._promising._guard.owned = lambda is_known: {(-1, 0): 2**62}
            self._promising._worth_deferring = 0
        self.expect_release, self.release = self._promising.expect_release, self._promising.release
        self.close = self._promising.close

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return settled(self._promising.stage(state_dict))


REGISTERED: dict[str, Callable[..., AsyncStager]] = {
    **{kind: functools.partial(build, kind) for kind in KINDS},
    "overlapped": Settled,
}
MAKERS = {
    **REGISTERED,
    "overlapped_late": functools.partial(Settled, True),
    "torch_plain": lambda: BlockingAsyncStager(False),
    "torch_cached": lambda: BlockingAsyncStager(True),
}


@pytest.fixture(autouse=True, scope="module")
def quick_collection() -> None:
    """Spares the stagers, which collect cycles before they wait, the many objects that have been there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=MAKERS)
def stager(request: pytest.FixtureRequest) -> Iterator[AsyncStager]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=REGISTERED)
def make(request: pytest.FixtureRequest) -> Callable[..., AsyncStager]:
    """Builds a registered stager with given arguments."""
    return MAKERS[request.param]


class Waits:
    """How often a stager came to its bound and waited, and an event that is set at the first time."""

    def __init__(self) -> None:
        self.count = 0
        self.began = threading.Event()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Records the waiting; a reader that promises nothing is given half a minute."""
    seen, wait = Waits(), memory.Pool._wait

    def record(pool: memory.Pool) -> None:
        seen.count += 1
        seen.began.set()
        wait(pool)

    monkeypatch.setattr(memory.Pool, "_wait", record)
    monkeypatch.setattr(memory, "WAIT_WITHOUT_RELEASE_S", 30.0)
    return seen


@contextlib.contextmanager
def held_back(**options: Any) -> Iterator[tuple[OverlappedStager, threading.Event]]:
    """A stager, and the event that its background copies wait for."""
    gate, run = threading.Event(), DeferredCopy.run

    def held(late: DeferredCopy) -> list[int]:
        assert gate.wait(WAIT_S)
        return run(late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredCopy, "run", held)
        stager = OverlappedStager(**options)
        try:
            yield stager, gate
        finally:
            gate.set()
            stager.close()


@pytest.fixture
def late() -> Iterator[tuple[OverlappedStager, threading.Event]]:
    with held_back() as both:
        yield both


@pytest.fixture
def gate(late) -> threading.Event:
    return late[1]
