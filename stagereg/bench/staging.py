"""``stagereg bench staging``: how long a training loop waits for a staged copy, relative to a plain memory copy.

There is one group of rows for each state dict. Most rows show the second and later calls of one stager, whose copy is
released before the next call. A row ``first:NAME`` shows the construction and the first call of a new stager in each
round. The state changes before every round. After the last round, each stager's copy is compared with the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import stagereg.bench.ceiling as ceiling
from stagereg.bench.measure import Case
from stagereg.bench.states import State, tensors
from stagereg.errors import StagingError
from stagereg.registry import build, names
from stagereg.stagers.async_stager import AsyncStager

_BACKGROUND = ("overlapped",)  # stagers whose stage() returns before the copy is complete, so they have two rows

_Make = Callable[[], AsyncStager]


class Warm(Case):
    """Measures calls of one stager after the first. Rows: the time in ``stage`` (if two rows), the total time."""

    def __init__(self, rows: tuple[str, ...], make: _Make, state: State) -> None:
        super().__init__(*rows)
        self._make = make
        self._state = state
        self._stager: AsyncStager | None = None

    def turn(self) -> Iterator[None]:
        if self._stager is None:
            self._stager = self._make()
        yield
        staged = self._stager.stage(self._state.tree)
        if len(self.rows) > 1:
            yield
        copy = _complete(self._stager, staged)
        yield
        del copy  # not timed

    def prove(self) -> None:
        """Raise ``StagingError`` if the copy differs from the state, or shares memory with it."""
        assert self._stager is not None
        copy = _complete(self._stager, self._stager.stage(self._state.tree))
        for mine, theirs in zip(tensors(copy), tensors(self._state.tree), strict=True):
            if mine.device.type != "cpu" or not torch.equal(mine, theirs.cpu()):
                raise StagingError([], "the copy differs from the state")
            if mine.data_ptr() == theirs.data_ptr():
                raise StagingError([], "the copy shares the memory of the state")

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def cases(state: State, device: str) -> list[Case]:
    """Return the cases for one state dict, with a ceiling first and last. Each stager is built at its first sample."""
    makes: dict[str, _Make] = {name: functools.partial(build, "stager", name) for name in names("stager")}
    torchs: dict[str, _Make] = {
        "torch:kept": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "torch:blocking": lambda: BlockingAsyncStager(False),
    }
    if device != "cpu":
        torchs["torch:pinned"] = lambda: DefaultStager(StagingOptions(True, False, False, True))
    two_times = {name: (f"{name}:blocked", f"{name}:done") for name in _BACKGROUND}
    top, again = (_ceiling(row, state, device) for row in (ceiling.ROW, f"again:{ceiling.ROW}"))
    return [
        top,
        *(Warm(two_times.get(name, (name,)), make, state) for name, make in {**makes, **torchs}.items()),
        _first("torch:per_save", torchs["torch:kept"], state),  # torch's async_save also builds a stager per save
        *(_first(f"first:{name}", make, state) for name, make in makes.items()),
        Warm(("again:pinned_cached",), makes["pinned_cached"], state),
        again,
    ]


def _ceiling(row: str, state: State, device: str) -> Case:
    @functools.cache
    def made() -> Callable[[], object]:
        return ceiling.memmove(state.nbytes) if device == "cpu" else ceiling.device_copy(state.nbytes, device)

    def turn() -> Iterator[None]:
        copy = made()
        yield
        copy()
        yield

    return Case(row, turn=turn)


def _first(row: str, make: _Make, state: State) -> Case:

    def turn() -> Iterator[None]:
        yield
        stager = make()
        try:
            copy = _complete(stager, stager.stage(state.tree))
            yield
            del copy
        finally:
            stager.close()

    return Case(row, turn=turn)


def _complete(stager: AsyncStager, staged: Any) -> Any:
    if isinstance(staged, Future):
        return staged.result()
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return staged
