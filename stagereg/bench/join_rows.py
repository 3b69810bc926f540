"""``stagereg bench join``: what a training step costs in a join, beside torch's, on ranks that all have data.

Each group is a model on a number of ranks, and its rows are ways to hold a join around the loop. Each row shows the
time of a step on the slowest rank, and its ratio to that of the row without a join *in the same round*, for the machine
changes from round to round; of these ratios the median, and the ratio of the 20th percentiles, which the busy moments
of the machine do not reach. And how many collectives a step begins beyond those of the step without a join. The rows
``enter+leave:...`` are the time of entering and leaving such a join once, held against the same step.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
from collections.abc import Sequence

from stagereg.bench.join_rank import ENTRY, MODELS, WAYS, Taken, measure
from stagereg.bench.report import Group, Line
from stagereg.errors import LaunchError
from stagereg.testing.ranks import RankFailure, run_ranks

__all__ = ["AGAIN", "BASE", "group", "measured", "noise", "row_names"]

BASE = "off"
"""The row without a join, which all others are held against."""
AGAIN = f"again:{BASE}"
"""The same once more: its distance from the first is noise."""
_ENTERED = ("torch:on", "torch:throw", "torch_wire", "counted", "planned", "iterate:counted", "iterate:planned")

_HOUR_S = 3600.0
_CONFIDENCE = 1.96  # standard deviations of a binomial count on either side: 95 %


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [*WAYS, *(f"{ENTRY}{row}" for row in _ENTERED)]


def measured(model: str, ranks: int, rows: Sequence[str], rounds: int) -> list[Taken]:
    """Measure ``rows``, and the two without a join, on fresh local ranks; return what they have come to, by rank.

    Raises:
        LaunchError: a rank died, or did not come to an end.
    """
    asked = dict.fromkeys(row.removeprefix(ENTRY) for row in rows)
    wanted = [BASE, *(row for row in asked if row not in (BASE, AGAIN)), AGAIN]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the output of ranks is no part of the tables
            return run_ranks(measure, ranks, args=(model, wanted, rounds), timeout_s=_HOUR_S)
    except RankFailure as error:
        raise LaunchError(f"The join of {ranks} ranks could not be measured: {error}") from error


def group(model: str, ranks: int, taken: Sequence[Taken]) -> Group:
    """Make the rows of a table from what the ranks measured."""
    base = _slowest(taken, BASE)
    ways = list(taken[0][1])
    lines = [_line(row, taken, base) for row in [*ways, *(f"{ENTRY}{row}" for row in ways if row in _ENTERED)]]
    title = f"join {model}, {ranks} rank{'s' * (ranks > 1)}: DDP, {MODELS[model].parameters:,} parameters"
    for again in (line for line in lines if line.row == AGAIN and line.samples):
        title += f"; below {noise(again.samples['x']):.2f} x off there is only noise"
    return Group(f"{model}/{ranks}", title, lines)


def noise(ratios: Sequence[float]) -> float:
    """The smallest ratio that differs from 1.0, by the A/A row's ratios of all rounds.

    It is as far above 1.0 as the farther end of the 95 % confidence interval of their median, by order statistics,
    which asks nothing of their distribution.
    """
    ordered = sorted(ratios)
    half = _CONFIDENCE * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return 1.0 + max(abs(ordered[low] - 1.0), abs(ordered[high] - 1.0))


def _line(row: str, taken: Sequence[Taken], base: Sequence[float]) -> Line:
    series = taken[0][0][row]
    if series.failure or not base:
        return Line(row, failure=series.failure or f"there is no row {BASE!r} to hold it against")
    seconds = _slowest(taken, row)
    ratios = [mine / other for mine, other in zip(seconds, base, strict=True)]
    figures = {"p20": _p20(seconds) / _p20(base)}
    counts = [of_rank[row] for _, of_rank in taken if row in of_rank]
    without = taken[0][1][BASE]
    if counts and without:
        most = [max(each[i] for each in counts if each) - without[i] for i in (0, 1)]
        figures |= {"collectives": most[0], "blocking": most[1]}
    return Line(row, {"x": ratios, "step": seconds}, ratio=statistics.median(ratios), figures=figures)


def _slowest(taken: Sequence[Taken], row: str) -> list[float]:
    """Of each round, the seconds of the rank that took longest."""
    return [max(each) for each in zip(*(series[row].samples for series, _ in taken), strict=True)]


def _p20(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return ordered[int(0.2 * (len(ordered) - 1))]
