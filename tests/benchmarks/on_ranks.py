"""Measuring on several local ranks: they take the same turns, and the time of a round is that of the slowest rank."""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from stagereg.bench.measure import Case, Series
from stagereg.bench.report import Line, iqr, ms
from stagereg.errors import LaunchError
from stagereg.testing.ranks import RankFailure, run_ranks

Taken = Sequence[Mapping[str, Series]]
"""What the ranks have measured, by rank and row."""

_HOUR_S = 3600.0


class Turn(Case):
    """A case that all ranks do at the same time."""

    def sample(self, settle: Callable[[], None], clock: Callable[[], float]) -> Mapping[str, float]:
        """Do it once. Raises ``LaunchError`` on all ranks if one of them fails."""
        taken: Mapping[str, float] = {}
        mine = ""
        try:
            taken = super().sample(settle, clock)
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"
        errors = [""] * dist.get_world_size()
        dist.all_gather_object(errors, mine)
        for rank, text in enumerate(errors):
            if text:
                raise LaunchError(f"rank {rank}: {text}")
        return taken


def measured(what: str, ranks: int, task: Callable[..., dict[str, Series]], *args: object) -> list[dict[str, Series]]:
    """Run ``task(rank, world, *args)`` on fresh local ranks; return what they have measured, by rank.

    Raises:
        LaunchError: a rank died, or did not come to an end.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the output of ranks is no part of the tables
            return run_ranks(task, ranks, args=args, timeout_s=_HOUR_S)
    except RankFailure as error:
        raise LaunchError(f"The {what} of {ranks} ranks could not be measured: {error}") from error


def failure(taken: Taken, *rows: str) -> str:
    """Return why one of these rows has no figures; empty if all have."""
    return next((text for row in rows for series in taken if (text := series[row].failure)), "")


def line(row: str, taken: Taken, base: str) -> Line:
    """Make the row of a table: the time of a step, and its ratio to that of ``base``, with what most rounds have."""
    if why := failure(taken, row, base):
        return Line(row, failure=why)
    seconds, against = slowest(taken, row), ratios(taken, row, base)
    ratio = statistics.median(against)
    cells = [ms(statistics.median(seconds)), f"{ratio:.3f}", iqr(against, "{:.2f}".format)]
    return Line(row, cells, {"x": against, "step": seconds}, {"ratio": ratio})


def slowest(taken: Taken, row: str) -> list[float]:
    """Of each round, the seconds of the rank that took longest."""
    return [max(each) for each in zip(*(series[row].samples for series in taken), strict=True)]


def ratios(taken: Taken, row: str, base: str) -> list[float]:
    """Of each round, how many times longer one row took than another."""
    return [mine / other for mine, other in zip(slowest(taken, row), slowest(taken, base), strict=True)]
