"""Jobs side by side: one row for each combination of what was swept, and how sure the best is.

Repeats of a combination become their median and the range between their quartiles. A row ties with the best where
their medians differ by no more than either's spread, or in proportion by no more than one combination differs from
itself (the A/A row), or where few runs overlap. Only completed jobs count; a combination that failed in any of its
runs, or has the figure in only some, is never best. The order in which results are given makes no difference.

The figures are defined in :mod:`stagereg.sweep.metric`; the sentence is made in :mod:`stagereg.sweep.answer`,
warnings in ``comparison_warnings``.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import stagereg.sweep.answer as answer
import stagereg.sweep.comparison_warnings as comparison_warnings
from stagereg.errors import ConfigError
from stagereg.sweep.interleaved import KEYS, InterleavedSweeper
from stagereg.sweep.metric import METRICS, RETURNED, Metric, directed
from stagereg.sweep.metric import metric as named
from stagereg.sweep.result import JobResult

__all__ = ["Cell", "Comparison", "ComparisonRow", "Tie", "compare"]

_ENOUGH = 5
"""Values from which on quartiles alone distinguish a difference from chance.

Of fewer, all of one row must be better.
"""

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

    EQUAL = "equal"
    SPREAD = "spread"
    NOISE = "noise"
    OVERLAP = "overlap"


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
        versions: of stagereg and torch, where rows differ in them.
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
            if 0 < counts[status] < len(self.jobs):
                return f"{counts[status]} of {len(self.jobs)} {status}"
            if counts[status]:
                return status
        return "completed"

    @property
    def label(self) -> str:
        """The combination as one would type it, and the versions where rows differ in them."""
        typed = " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "as configured"
        return f"{typed} ({self.versions})" if self.versions else typed

    def is_candidate(self, name: str) -> bool:
        """Whether it may be the best by a metric: no job failed, and each that was completed has the figure."""
        completed = sum(job.status == "completed" for job in self.jobs)
        failed = any(job.status == "failed" for job in self.jobs)
        return not self.again and not failed and name in self.cells and len(self.cells[name].values) == completed


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
        return next(iter(self._marked("best")), None)

    @property
    def ties(self) -> tuple[ComparisonRow, ...]:
        """The rows that tie with the best."""
        return tuple(self._marked("tie"))

    @property
    def answer(self) -> str:
        """What came out, in a sentence or two: which is best, and whether the difference is real."""
        return answer.sentences(self)

    @property
    def repeatable(self) -> bool:
        """Whether the sweeper that chose the jobs takes ``sweep.repeats``, as far as is known."""
        sweepers = {job.job.get("sweeper") for row in self.rows for job in row.jobs}
        return sweepers <= {None, InterleavedSweeper.__name__}

    @property
    def candidates(self) -> tuple[ComparisonRow, ...]:
        """The rows that may be best by the ranking metric."""
        return tuple(row for row in self.rows if row.is_candidate(self.ranking.name))

    def tie(self, one: ComparisonRow, other: ComparisonRow) -> Tie | None:
        """Why two rows tie by the ranking metric; ``None`` where they do not. Both have the figure."""
        name = self.ranking.name
        return _tie(one.cells[name], other.cells[name], _noise(self.rows, name))

    def _marked(self, verdict: str) -> Iterator[ComparisonRow]:
        name = self.ranking.name
        return (row for row in self.rows if name in row.cells and row.cells[name].verdict == verdict)


def compare(results: Sequence[JobResult], metric: str = "stall_ms", direction: str | None = None) -> Comparison:
    """Compare the jobs of a sweep.

    Args:
        results: its jobs, as :func:`stagereg.sweep.result.results` finds them.
        metric: what to rank by.
        direction: ``"minimize"`` or ``"maximize"``; ``None`` is the metric's own.

    Raises:
        ConfigError: there is no such metric or direction, or no job.
    """
    ranking = directed(metric, direction)
    if not results:
        raise ConfigError("There are no jobs to compare.")
    jobs = sorted(results, key=lambda job: job.order)
    taken = [_by_key(job.overrides) for job in jobs]
    parameters = _swept(jobs, taken)
    groups = _groups(jobs, taken)
    versions = _known_versions(groups)
    rows = [_row(group, parameters, of, ranking) for group, of in zip(groups, versions, strict=True)]
    columns = _columns(rows, ranking)
    return Comparison(
        directory=_directory(jobs),
        parameters=parameters,
        constant=tuple(o for o in jobs[0].overrides if _by_key([o]).keys() - set(parameters)),
        metrics=columns,
        rows=tuple(_judged(rows, columns, ranking)),
        repeats=1 + max(job.repeat for job in jobs),
        ranking=ranking,
        warnings=tuple(comparison_warnings.of(jobs, rows, ranking)),
    )


# -- rows


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by what they change, if that is the program; of two for one key, Hydra takes the last."""
    parts = (override.partition("=") for override in overrides)
    keys = {(key if key.startswith("~") else key.lstrip("+")): value for key, _, value in parts}
    return {key: value for key, value in keys.items() if key not in KEYS}


def _swept(jobs: Sequence[JobResult], taken: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The keys in which jobs differ, as they were first named; of jobs whose overrides are known."""
    known = [keys for job, keys in zip(jobs, taken, strict=True) if keys or job.status == "completed"]
    names = dict.fromkeys(key for keys in known for key in keys)
    return tuple(name for name in names if len({keys.get(name) for keys in known}) > 1)


def _groups(jobs: Sequence[JobResult], taken: Sequence[Mapping[str, str]]) -> list[list[JobResult]]:
    """Jobs of one combination and of the same versions together, each A/A group after the one that it repeats."""
    versions: dict[tuple[bool, frozenset[tuple[str, str]]], tuple[str, str]] = {}
    for job, keys in zip(jobs, taken, strict=True):
        if any(_versions(job)):
            versions.setdefault((job.again, frozenset(keys.items())), _versions(job))
    groups: defaultdict[tuple[frozenset[tuple[str, str]], tuple[str, str], bool], list[JobResult]] = defaultdict(list)
    for job, keys in zip(jobs, taken, strict=True):
        combination = frozenset(keys.items())
        own = _versions(job)
        # A job that was killed before it could record its versions has those of the others.
        groups[combination, own if any(own) else versions.get((job.again, combination), own), job.again].append(job)
    order = {key: at for at, key in enumerate(groups)}
    twins = {key: (*key[:2], False) for key in groups}
    return [groups[key] for key in sorted(groups, key=lambda key: (order.get(twins[key], order[key]), key[2]))]


def _versions(job: JobResult) -> tuple[str, str]:
    return job.versions.get("stagereg", ""), job.versions.get("torch", "")


def _known_versions(groups: Sequence[Sequence[JobResult]]) -> list[str]:
    """Of each group, the versions in which groups differ."""
    each = [next((_versions(job) for job in group if any(_versions(job))), ("", "")) for group in groups]
    differ = [len({versions[at] for versions in each if any(versions)}) > 1 for at in (0, 1)]
    names = ("stagereg", "torch")
    return [
        ", ".join(f"{names[at]} {versions[at] or 'unknown'}" for at in (0, 1) if differ[at]) if any(versions) else ""
        for versions in each
    ]


def _row(jobs: Sequence[JobResult], parameters: Sequence[str], versions: str, ranking: Metric) -> ComparisonRow:
    keys = _by_key(jobs[0].overrides)
    completed = [job for job in jobs if job.status == "completed"]
    names = [one.name for one in METRICS]
    names += sorted({name for job in completed for name in job.figures if name.startswith(RETURNED)})
    values = {name: [job.figures[name] for job in completed if job.has(name)] for name in names}
    broken = sorted((job for job in jobs if job.status != "completed"), key=lambda job: job.status != "failed")
    return ComparisonRow(
        parameters={name: keys[name] for name in parameters if name in keys},
        jobs=tuple(jobs),
        cells={name: Cell.of(several) for name, several in values.items() if several},
        again=jobs[0].again,
        error=broken[0].error or "no error recorded" if broken else "",
        note="; ".join(comparison_warnings.of_row(completed, ranking)),
        versions=versions,
    )


# -- verdicts


def _columns(rows: Sequence[ComparisonRow], ranking: Metric) -> tuple[Metric, ...]:
    """The metrics that any row has; what tasks return has no better side, unless rows are ranked by it."""
    there = {name for row in rows for name in row.cells}
    returned = sorted(name for name in there if name.startswith(RETURNED))
    every = [*METRICS, *(replace(named(name), better="") for name in returned)]
    return tuple(ranking if one.name == ranking.name else one for one in every if one.name in there)


def _judged(rows: Sequence[ComparisonRow], columns: Sequence[Metric], ranking: Metric) -> Iterator[ComparisonRow]:
    """The rows with the best of each column marked, and what ties with it; nothing where all are equal.

    Of equal rows the first is the best by ``ranking``: the answer has to begin with one of them.
    """
    verdicts: list[dict[str, str]] = [{} for _ in rows]
    for column in columns:
        name = column.name
        candidates = [at for at, row in enumerate(rows) if row.is_candidate(name)]
        if not column.better or not candidates:
            continue
        sign = 1 if column.better == "lower" else -1
        best = min(candidates, key=lambda at: sign * rows[at].cells[name].median)
        noise = _noise(rows, name)
        ties = {at: _tie(rows[best].cells[name], rows[at].cells[name], noise) for at in candidates if at != best}
        if ties and set(ties.values()) == {Tie.EQUAL} and name != ranking.name:
            continue
        verdicts[best][name] = "best"
        for at in (at for at, why in ties.items() if why):
            verdicts[at][name] = "tie"
    for row, found in zip(rows, verdicts, strict=True):
        cells = {name: replace(cell, verdict=found.get(name, "")) for name, cell in row.cells.items()}
        yield replace(row, cells=cells)


def _tie(one: Cell, other: Cell, noise: float) -> Tie | None:
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


def _noise(rows: Sequence[ComparisonRow], name: str) -> float:
    """By what part a combination differs from itself: the largest difference of an A/A pair; 0 without one.

    A part, since what disturbs a time or a rate of a machine makes long ones longer by more than short ones.
    """
    differences = [
        _part(row.cells[name].median, twin.cells[name].median)
        for row in rows
        if row.again and name in row.cells
        for twin in rows
        if not twin.again and (twin.parameters, twin.versions) == (row.parameters, row.versions) and name in twin.cells
    ]
    return max(differences, default=0.0)


def _part(one: float, other: float) -> float:
    """The difference of two figures as a part of the larger one."""
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _directory(jobs: Sequence[JobResult]) -> Path:
    """The folder that all jobs are in."""
    parents = [job.directory.parent for job in jobs]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.absolute() for parent in parents]
    return Path(os.path.commonpath(parents) or ".")
