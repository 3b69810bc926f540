"""``stagereg bench staging``: how long a training loop waits for a copy, against the speed of the memory.

One group of rows a state dict. Warm rows are the second and later calls of one stager, whose copy is dropped before
the next call; ``first:`` rows are the first call of a fresh stager, constructing it included, each round a new one.
What is not frozen changes before every round. After the rounds every stager has to show that its copy is equal to the
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import stagereg.bench.ceiling as ceiling
from stagereg.bench.measure import Case, Stopwatch, Timed
from stagereg.bench.states import State, tensors
from stagereg.errors import StagingError
from stagereg.registry import build, names
from stagereg.stagers.async_stager import AsyncStager

__all__ = ["CEILING", "cases", "row_names"]

CEILING = "ceiling"
"""The row that all others are a ratio to."""

_BACKGROUND = ("overlapped",)  # stage() returns before the copy is there, so there are two times
_TWICE = "pinned_cached"

_Make = Callable[[], AsyncStager]


class Warm(Case):
    """Later calls of one stager. Its rows are the time until the copy is there, or before it the time in ``stage``."""

    def __init__(self, rows: tuple[str, ...], make: _Make, state: State) -> None:
        super().__init__(*rows)
        self._make = make
        self._state = state
        self._stager: AsyncStager | None = None

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Stage once more."""
        if self._stager is None:
            self._stager = self._make()
        watch.start()
        staged = self._stager.stage(self._state.tree)
        blocked = watch.lap(settled=False)
        copy = _complete(self._stager, staged)
        done = watch.lap()
        del staged, copy
        return dict(zip(self.rows, (blocked, done)[-len(self.rows) :], strict=True))

    def prove(self) -> None:
        """Raise if a copy differs from the state, or is the state."""
        assert self._stager is not None
        copy = _complete(self._stager, self._stager.stage(self._state.tree))
        for mine, theirs in zip(tensors(copy), tensors(self._state.tree), strict=True):
            if mine.device.type != "cpu" or not torch.equal(mine, theirs.cpu()):
                raise StagingError([], "the copy differs from the state")
            if mine.data_ptr() == theirs.data_ptr():
                raise StagingError([], "the copy shares the memory of the state")

    def close(self) -> None:
        """Close the stager."""
        if self._stager is not None:
            self._stager.close()


def cases(state: State, device: str) -> list[Case]:
    """The cases of one state dict, the ceiling first and once more last."""
    makes = {name: _registered(name, state) for name in names("stager")}
    torchs = _torchs(device)
    return [
        _ceiling(CEILING, state, device),
        *(Warm(_warm_rows(name), make, state) for name, make in makes.items()),
        *(Warm((row,), make, state) for row, make in torchs.items()),
        _first("torch:per_save", torchs["torch:kept"], state),  # what torch's async_save takes
        *(_first(f"first:{name}", make, state) for name, make in makes.items()),
        Warm((f"again:{_TWICE}",), makes[_TWICE], state),
        _ceiling(f"again:{CEILING}", state, device),
    ]


def row_names(device: str) -> list[str]:
    """The names of all rows there are on ``device``."""
    mine = names("stager")
    warm = [row for name in mine for row in _warm_rows(name)]
    first = [f"first:{name}" for name in mine]
    return [CEILING, *warm, *_torchs(device), "torch:per_save", *first, f"again:{_TWICE}", f"again:{CEILING}"]


def _warm_rows(name: str) -> tuple[str, ...]:
    return (f"{name}:blocked", f"{name}:done") if name in _BACKGROUND else (name,)


def _ceiling(row: str, state: State, device: str) -> Case:
    if device == "cpu":
        return Timed(row, lambda: ceiling.memmove(state.nbytes))
    return Timed(row, lambda: ceiling.device_copy(state.nbytes, device))


def _first(row: str, make: _Make, state: State) -> Case:
    """A stager's first call, constructing included and closing not."""

    def stage(_: Any) -> tuple[AsyncStager, Any]:
        stager = make()
        try:
            return stager, _complete(stager, stager.stage(state.tree))
        except Exception:
            stager.close()
            raise

    return Timed(row, lambda: stage, after=lambda _, staged: staged[0].close())


def _registered(name: str, state: State) -> _Make:
    declared: dict[str, Any] = {"frozen": list(state.frozen)} if name == "incremental" and state.frozen else {}
    return lambda: build("stager", name, **declared)


def _torchs(device: str) -> dict[str, _Make]:
    makes: dict[str, _Make] = {
        "torch:kept": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "torch:blocking": lambda: BlockingAsyncStager(False),
    }
    if device != "cpu":
        makes["torch:pinned"] = lambda: DefaultStager(StagingOptions(True, False, False, True))
    return makes


def _complete(stager: AsyncStager, staged: Any) -> Any:
    if isinstance(staged, Future):
        return staged.result()
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return staged
