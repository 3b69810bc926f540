"""Jobs side by side: one row for each combination of what was swept, and how sure the best is.

Repeats of a combination become their median and the range between their quartiles. A row ties with the best where
their medians differ by no more than either's spread, or in proportion by no more than one combination differs from
itself (the A/A row), or where few runs overlap. Only completed jobs count; a combination that failed in any of its
runs, or has the figure in only some, is never best.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagereg.errors import ConfigError, few_of
from stagereg.sweep.metric import Metric, columns, counted, directed
from stagereg.sweep.result import KEYS, JobResult

_ENOUGH = 5  # values from which on quartiles alone prove a difference; of fewer, all of one row must be better
_ROUNDING = 1e-6  # relative difference of figures that may come from the order in which numbers were added
_OVERLAP_S = 1.0  # seconds that two jobs may run beside each other: one is ending while the next begins
_NAMED = 3
_EQUAL = "the figures are equal"


@dataclass(frozen=True)
class Cell:
    """One figure of one combination."""

    median: float  # of the values
    # the range between their first and third quartile, interpolated within the values; `None` for one
    spread: float | None
    values: tuple[float, ...]  # of the completed jobs, in their order
    verdict: str = ""  # `"best"` of its column, `"tie"` with the best, or empty
    reason: str = ""  # why it ties

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        spread = None
        if len(values) > 1:
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
            spread = third - first
        return cls(statistics.median(values), spread, tuple(values))


@dataclass(frozen=True)
class ComparisonRow:
    """One combination: its jobs, all of the same versions."""

    parameters: dict[str, str]  # those of its overrides that differ between jobs, by key
    jobs: tuple[JobResult, ...]  # its runs, in their order, also those that were not completed
    cells: dict[str, Cell] = field(default_factory=dict)  # by name of the metric; of the completed jobs
    # whether it is the A/A row: the first combination once more, measured as if it were another one
    again: bool = False
    error: str = ""  # of the first job that failed, or else of the first unfinished one; empty if all were completed
    note: str = ""  # what else a reader of the row should know
    versions: str = ""  # of stagereg and torch, where jobs differ in them

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

    def verdict(self, name: str) -> str:
        """``"best"``, ``"tie"``, ``"A/A"``, ``"failed"``, ``"unfinished"`` or empty, by a metric."""
        if not self.cells and self.status != "completed":
            return "unfinished" if self.status == "unfinished" else "failed"
        if self.again:
            return "A/A"
        return self.cells[name].verdict if name in self.cells else ""

    def is_candidate(self, name: str) -> bool:
        """Whether it may be the best by a metric: no job failed, and each that was completed has the figure."""
        statuses = [job.status for job in self.jobs]
        known = len(self.cells[name].values) if name in self.cells else 0
        return not self.again and "failed" not in statuses and 0 < known == statuses.count("completed")


@dataclass(frozen=True)
class Comparison:
    """Rows to be shown, in the order in which the combinations were planned; the A/A row follows the one it repeats."""

    directory: Path  # of the sweep
    parameters: tuple[str, ...]  # the keys that were swept
    constant: tuple[str, ...]  # the overrides that all jobs share, without those of the sweep itself
    metrics: tuple[Metric, ...]  # the columns: those that any row has
    rows: tuple[ComparisonRow, ...]  # one for each combination
    repeats: int  # how often each combination was to run
    ranking: Metric  # what rows are ranked by, and in which direction
    warnings: tuple[str, ...] = ()  # what a reader should know before trusting the figures

    @property
    def ranked(self) -> list[ComparisonRow]:
        """The rows as they are shown: best first; those without that figure follow, and those without any are last."""
        name, sign = self.ranking.name, self.ranking.sign

        def position(row: ComparisonRow) -> tuple[int, float]:
            if name in row.cells:
                return 0, sign * row.cells[name].median
            return (1 if row.cells else 2), 0.0

        return sorted(self.rows, key=position)

    @property
    def best(self) -> ComparisonRow | None:
        """The row that is best by the ranking metric; ``None`` where no row may be."""
        return next((row for row in self.rows if row.verdict(self.ranking.name) == "best"), None)

    @property
    def ties(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.verdict(self.ranking.name) == "tie"]


def compare(results: Sequence[JobResult], metric: str = "stall_ms", direction: str | None = None) -> Comparison:
    """Compare the jobs of a sweep, by ``metric``, and by its own direction if none is given."""
    ranking = directed(metric, direction)
    if not results:
        raise ConfigError("There are no jobs to compare.")
    jobs = sorted(results, key=lambda job: job.order)
    parameters = _swept(jobs)
    known = {name for job in jobs if job.status == "completed" for name in job.figures}
    metrics = [ranking if one.name == ranking.name else one for one in columns(known)]
    rows = [_row(group, parameters, versions, metrics, ranking) for versions, group in _groups(jobs)]
    for column in metrics:
        _judge(rows, column, ranking)
    return Comparison(
        directory=Path(os.path.commonpath([job.directory.parent for job in jobs]) or "."),
        parameters=parameters,
        constant=tuple(each for each in jobs[0].overrides if _by_key([each]).keys() - set(parameters)),
        metrics=tuple(metrics),
        rows=tuple(rows),
        repeats=1 + max(job.repeat for job in jobs),
        ranking=ranking,
        warnings=tuple(_warnings(jobs, rows)),
    )


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides by what they change, if that is the program; of two for one key, Hydra takes the last."""
    parts = (override.partition("=") for override in overrides)
    keys = {(key if key.startswith("~") else key.lstrip("+")): value for key, _, value in parts}
    return {key: value for key, value in keys.items() if key not in KEYS}


def _swept(jobs: Sequence[JobResult]) -> tuple[str, ...]:
    """The keys in which jobs differ, as they were first named; of jobs whose overrides are known."""
    known = [keys for job in jobs if (keys := _by_key(job.overrides)) or job.status == "completed"]
    names = dict.fromkeys(key for keys in known for key in keys)
    return tuple(name for name in names if len({keys.get(name) for keys in known}) > 1)


def _groups(jobs: Sequence[JobResult]) -> Iterator[tuple[str, list[JobResult]]]:
    """Versions, as far as jobs differ in them, with the jobs of one combination; an A/A group after what it repeats."""
    known = [job.versions for job in jobs if "stagereg" in job.versions] or [{}]
    differ = [name for name in ("stagereg", "torch") if len({versions.get(name) for versions in known}) > 1]
    groups: defaultdict[tuple[frozenset[tuple[str, str]], str], list[JobResult]] = defaultdict(list)
    for job in jobs:
        # A job that was killed before it could record its versions is taken to have those of the others.
        versions = job.versions if "stagereg" in job.versions else known[0]
        text = ", ".join(f"{name} {versions.get(name, 'unknown')}" for name in differ)
        groups[frozenset(_by_key(job.overrides).items()), text].append(job)
    for (_, text), group in groups.items():
        for again in (False, True):
            if part := [job for job in group if job.again == again]:
                yield text, part


def _row(
    jobs: Sequence[JobResult], parameters: Sequence[str], versions: str, metrics: Sequence[Metric], ranking: Metric
) -> ComparisonRow:
    keys = _by_key(jobs[0].overrides)
    completed = [job for job in jobs if job.status == "completed"]
    values = {one.name: [job.figures[one.name] for job in completed if one.name in job.figures] for one in metrics}
    broken = sorted((job for job in jobs if job.status != "completed"), key=lambda job: job.status != "failed")
    return ComparisonRow(
        parameters={name: keys[name] for name in parameters if name in keys},
        jobs=tuple(jobs),
        cells={name: Cell.of(several) for name, several in values.items() if several},
        again=jobs[0].again,
        error=broken[0].error or "no error recorded" if broken else "",
        note="; ".join(_notes(completed, ranking)),
        versions=versions,
    )


def _judge(rows: Sequence[ComparisonRow], column: Metric, ranking: Metric) -> None:
    """Mark the best of a column and what ties with it; of equal rows, the first by ``ranking`` and none otherwise."""
    name = column.name
    candidates = [row.cells for row in rows if row.is_candidate(name)]
    if not column.better or not candidates:
        return
    best = min(candidates, key=lambda cells: column.sign * cells[name].median)
    chance = _noise(rows, name)
    reasons = [_tie(best[name], cells[name], chance) for cells in candidates]
    if len(candidates) > 1 and set(reasons) == {_EQUAL} and name != ranking.name:
        return
    for cells, reason in zip(candidates, reasons, strict=True):
        if reason and cells is not best:
            cells[name] = replace(cells[name], verdict="tie", reason=reason)
    best[name] = replace(best[name], verdict="best")


def _tie(one: Cell, other: Cell, noise: float) -> str:
    """Why two cells differ by no more than chance may make them; empty where they differ by more.

    Quartiles of a few values are close by chance: a fifth of equal rows of three runs differ by more. So of few runs
    all of one row must be better than all of the other, which chance does one time in ten for three runs each.
    """
    difference = abs(one.median - other.median)
    if math.isclose(one.median, other.median, rel_tol=_ROUNDING):
        return _EQUAL
    if difference <= max(one.spread or 0.0, other.spread or 0.0):
        return "the difference is smaller than the spread"
    if difference <= noise * max(abs(one.median), abs(other.median)):
        return "the difference is smaller than that between two sets of runs of one combination"
    few = min(len(one.values), len(other.values)) < _ENOUGH
    apart = max(one.values) < min(other.values) or max(other.values) < min(one.values)
    return "their runs overlap" if few and not apart else ""


def _noise(rows: Sequence[ComparisonRow], name: str) -> float:
    """By what part a combination differs from itself: the largest difference of an A/A pair; 0 without one."""
    most = 0.0
    for twin, row in itertools.pairwise(rows):
        same = (twin.parameters, twin.versions) == (row.parameters, row.versions)
        if row.again and same and name in row.cells and name in twin.cells:
            one, other = row.cells[name].median, twin.cells[name].median
            most = max(most, abs(one - other) / (max(abs(one), abs(other)) or 1.0))
    return most


def _notes(completed: Sequence[JobResult], ranking: Metric) -> Iterator[str]:
    without = sum(ranking.name not in job.figures for job in completed)
    if 0 < without < len(completed):
        yield f"no {ranking.name} in {without} of {len(completed)} runs"
    if lost := sum(int(job.figures.get("lost_checkpoints", 0)) for job in completed):
        yield f"{counted(lost, 'checkpoint')} could not be saved"


def _warnings(jobs: Sequence[JobResult], rows: Sequence[ComparisonRow]) -> Iterator[str]:
    if mixed := sorted({row.versions for row in rows if row.versions}):
        yield (
            f"Results of different versions are mixed ({few_of(mixed, _NAMED, '; ')}). Each has rows of its own: "
            "what differs between them may come from the version."
        )
    machines = sorted({_machine(job) for job in jobs if job.status == "completed" and "cpu" in job.environment})
    if len(machines) > 1:
        named = few_of(machines, _NAMED, "; ")
        yield f"The jobs ran on different machines ({named}): what differs may come from the machine."
    if (beside := _beside(jobs)) > 1:
        yield f"Up to {beside} jobs ran at the same time on one machine, so they may have slowed each other down."
    if unfinished := sum(job.status == "unfinished" for job in jobs):
        yield f"Killed half-way or still running: {counted(unfinished, 'job')}, whose figures do not count."


def _machine(job: JobResult) -> str:
    cores = f"{job.environment.get('cores', 'unknown')} cores"
    return ", ".join(filter(None, (str(job.environment["cpu"]), cores, str(job.environment.get("device") or ""))))


def _beside(jobs: Sequence[JobResult]) -> int:
    long = [job for job in jobs if job.seconds > 2 * _OVERLAP_S and job.environment.get("host")]
    most = 0
    for one in long:  # most run at a time when one of them begins
        others = [job for job in long if job.environment["host"] == one.environment["host"]]
        most = max(most, sum(job.started <= one.started < job.started + job.seconds - _OVERLAP_S for job in others))
    return most
