"""What a comparison of jobs holds: cells, rows, verdicts; and when the difference of two cells means nothing.

Made by :mod:`stagereg.sweep.compare`; the sentence about it is made in :mod:`stagereg.sweep.answer`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from stagereg.sweep.metric import Metric
from stagereg.sweep.result import JobResult

__all__ = ["Cell", "Comparison", "ComparisonRow", "Tie", "noise", "tie"]

_ENOUGH = 5
"""Values from which on quartiles alone prove a difference; of fewer, all of one row must be better."""

_ROUNDING = 1e-6
"""Relative difference of figures that may come from the order in which numbers were added."""


@dataclass(frozen=True)
class Cell:
    """One figure of one combination.

    Attributes:
        median: of the values.
        spread: the range between their first and third quartile, interpolated within the values; ``None`` for one.
        values: of the completed jobs, in their order.
        verdict: ``"best"`` of its column, ``"tie"`` with the best, or empty.
    """

    median: float
    spread: float | None
    values: tuple[float, ...]
    verdict: str = ""

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        """The cell of at least one value."""
        spread = None
        if len(values) > 1:
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
            spread = third - first
        return cls(statistics.median(values), spread, tuple(values))


class Tie(Enum):
    """Why a difference between two combinations means nothing."""

    EQUAL = "the figures are equal"
    SPREAD = "the difference is smaller than the spread"
    NOISE = "the difference is smaller than that between two sets of runs of one combination"
    OVERLAP = "their runs overlap"


@dataclass(frozen=True)
class ComparisonRow:
    """One combination: its jobs, all of the same versions.

    Attributes:
        parameters: those of its overrides that differ between jobs, by key.
        jobs: its runs, in their order, also those that were not completed.
        cells: by name of the metric; of the completed jobs.
        again: whether it is the A/A row: the first combination once more, measured as if it were another one.
        error: of the first job that failed, or else of the first unfinished one; empty if all were completed.
        note: what else a reader of the row should know.
        versions: of stagereg and torch, where jobs differ in them.
    """

    parameters: dict[str, str]
    jobs: tuple[JobResult, ...]
    cells: dict[str, Cell] = field(default_factory=dict)
    again: bool = False
    error: str = ""
    note: str = ""
    versions: str = ""

    @property
    def status(self) -> str:
        """``"completed"``, ``"failed"``, ``"unfinished"``, or how many of its jobs are, as in ``"2 of 3 failed"``."""
        counts = Counter(job.status for job in self.jobs)
        for status in ("failed", "unfinished"):
            if counts[status]:
                return status if counts[status] == len(self.jobs) else f"{counts[status]} of {len(self.jobs)} {status}"
        return "completed"

    @property
    def label(self) -> str:
        """The combination as one would type it, and the versions where rows differ in them."""
        typed = " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "as configured"
        return f"{typed} ({self.versions})" if self.versions else typed

    def is_candidate(self, name: str) -> bool:
        """Whether it may be the best by a metric: no job failed, and each that was completed has the figure."""
        statuses = [job.status for job in self.jobs]
        known = len(self.cells[name].values) if name in self.cells else 0
        return not self.again and "failed" not in statuses and 0 < known == statuses.count("completed")


@dataclass(frozen=True)
class Comparison:
    """Rows to be shown, in the order in which the combinations were planned; the A/A row follows the one it repeats.

    Attributes:
        directory: of the sweep.
        parameters: the keys that were swept.
        constant: the overrides that all jobs share, without those of the sweep itself.
        metrics: the columns: those that any row has.
        rows: one for each combination.
        repeats: how often each combination was to run.
        ranking: what rows are ranked by, and in which direction.
        warnings: what a reader should know before trusting the figures.
    """

    directory: Path
    parameters: tuple[str, ...]
    constant: tuple[str, ...]
    metrics: tuple[Metric, ...]
    rows: tuple[ComparisonRow, ...]
    repeats: int
    ranking: Metric
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> ComparisonRow | None:
        """The row that is best by the ranking metric; ``None`` where no row may be."""
        return next(self._marked("best"), None)

    @property
    def ties(self) -> tuple[ComparisonRow, ...]:
        """The rows that tie with the best."""
        return tuple(self._marked("tie"))

    @property
    def candidates(self) -> tuple[ComparisonRow, ...]:
        """The rows that may be best by the ranking metric, the best first."""
        name = self.ranking.name
        found = [row for row in self.rows if row.is_candidate(name)]
        return tuple(sorted(found, key=lambda row: self.ranking.sign * row.cells[name].median))

    def tie(self, one: ComparisonRow, other: ComparisonRow) -> Tie | None:
        """Why two rows tie by the ranking metric; ``None`` where they do not. Both have the figure."""
        name = self.ranking.name
        return tie(one.cells[name], other.cells[name], noise(self.rows, name))

    def _marked(self, verdict: str) -> Iterator[ComparisonRow]:
        name = self.ranking.name
        return (row for row in self.rows if name in row.cells and row.cells[name].verdict == verdict)


def tie(one: Cell, other: Cell, noise: float) -> Tie | None:
    """Why two cells differ by no more than chance may make them.

    Quartiles of a few values lie close to one another by chance: of two rows of three runs of the same, a fifth would
    differ by more than that. So of few runs all of one row have to be better than all of the other, too, which three
    runs each are by chance one time in ten, and less often where their spread must be exceeded as well.
    """
    difference = abs(one.median - other.median)
    if math.isclose(one.median, other.median, rel_tol=_ROUNDING):
        return Tie.EQUAL
    if difference <= max(one.spread or 0.0, other.spread or 0.0):
        return Tie.SPREAD
    if difference <= noise * max(abs(one.median), abs(other.median)):
        return Tie.NOISE
    few = min(len(one.values), len(other.values)) < _ENOUGH
    apart = max(one.values) < min(other.values) or max(other.values) < min(one.values)
    return Tie.OVERLAP if few and not apart else None


def noise(rows: Sequence[ComparisonRow], name: str) -> float:
    """By what part a combination differs from itself: the largest difference of an A/A pair; 0 without one.

    A part, since what disturbs a time or a rate of a machine makes long ones longer by more than short ones.
    """
    most = 0.0
    for twin, row in itertools.pairwise(rows):
        same = (twin.parameters, twin.versions) == (row.parameters, row.versions)
        if row.again and same and name in row.cells and name in twin.cells:
            one, other = row.cells[name].median, twin.cells[name].median
            most = max(most, abs(one - other) / (max(abs(one), abs(other)) or 1.0))
    return most
