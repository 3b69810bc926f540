"""Saving what several ranks hold alike, or have split: ``make bench-replicas``.

The model is the model of ``make bench-restore``. A save is timed until it is committed. The time of a round is that of
the slowest rank, and is held against torch's way in the same round. Bytes are shares of the whole state.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import stagereg.bench.command as command
from stagereg.assembly import Replicas
from stagereg.bench.measure import Series, interleave
from stagereg.bench.report import Group
from stagereg.stagers.pinned_cached import PinnedCachedStager
from tests.benchmarks import on_ranks, program
from tests.benchmarks.restore import AGAIN, MODELS, SplitTraining, SplitTurn, line, moved, nbytes, title
from tests.benchmarks.write import storages

_SAVE, _ASYNC, _FIRST = "torch:save", "torch:async_save", "first:"
BASES = {"x torch": _SAVE}
"""The row that the others are held against, by the head of the column."""

_SHARES = ("staged", "written")


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [*storages(), f"{_FIRST}dcp", _SAVE, _ASYNC, AGAIN + _SAVE]


class CountedStager(PinnedCachedStager):
    """Counts the bytes of the copy made last."""

    nbytes = 0

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy, and count."""
        copy = super().stage(state_dict)
        self.nbytes = nbytes(copy)
        return copy


class Saving(SplitTurn):
    """One way to save. Rows: the time in the call, the time until it is committed, and shares staged and written."""

    def __init__(self, row: str, training: SplitTraining, folder: Path) -> None:
        super().__init__(row, training, folder, f"{row}:blocked", row, *(f"{row}:{share}" for share in _SHARES))
        self._stager = CountedStager()

    def turn(self) -> Iterator[float | None]:
        """Save once more."""
        storage = self.way.removeprefix(_FIRST)
        if storage in storages():
            self.begin(storage, stager=self._stager, replicas=Replicas(share=storage == self.way))
        elif dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        before = moved("wchar")
        yield None
        wait = self.save()
        yield None
        wait()
        yield None
        # Torch's stager copies all that it is given.
        yield (nbytes(self.training.tree()) if self.way == _ASYNC else self._stager.nbytes) / self.training.nbytes
        yield (moved("wchar") - before) / self.training.nbytes

    def save(self) -> Callable[[], object]:
        """Save, and return what waits for its end."""
        if self.way != _ASYNC:
            return super().save()
        future: Any = async_save(self.training.tree(), checkpoint_id=self.folder)
        return future.result  # type: ignore[no-any-return]


def measure(
    rank: int, world: int, model: str, rows: Sequence[str], rounds: int, scale: float, folder: Path
) -> dict[str, Series]:
    """Measure rows of :func:`row_names`, on a rank."""
    training = SplitTraining(model, scale)
    cases = [Saving(row, training, folder / str(number)) for number, row in enumerate(rows)]
    return {one.row: one for one in interleave(cases, rounds)}


def group(model: str, ranks: int, rows: Sequence[str], rounds: int, scale: float, folder: Path) -> Group:
    """Measure rows, and the one that they are held against, on fresh local ranks."""
    wanted = [row for row in row_names() if row in {*rows, *BASES.values()}]
    taken = on_ranks.measured("replicas", ranks, measure, model, wanted, rounds, scale, folder)
    heads = ["median ms", "IQR ms", *BASES, "blocked ms", *_SHARES]
    lines = [line(row, taken, BASES, _SHARES, times=["blocked"]) for row in wanted]
    return Group(f"{model}/{ranks}", title("replicas", model, ranks), heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="How long ranks save what they hold alike or have split.")
    command.add_options(parser, 9, lambda asked: row_names(), program.by_ranks(group))
    program.add_ranks(parser, MODELS, "1,2,4")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
