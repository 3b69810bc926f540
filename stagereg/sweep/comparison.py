"""Compares the jobs of a sweep: builds a row for each combination of parameters, and finds the rows that tie.

A row differs from the best row if both have at least four runs, their medians differ by more than ``matters``, and a
rank-sum test is significant. Otherwise the row ties with the best row. Only completed jobs count. A combination with a
failed run, or with a run without a finite value, is never best.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagereg.base.overrides import by_key
from stagereg.errors import ConfigError, few_of
from stagereg.sweep.cell import Cell, ties
from stagereg.sweep.metric import Metric, columns, directed, least_difference
from stagereg.sweep.number_text import counted, parameter_text, percent
from stagereg.sweep.rank_sum import p_value
from stagereg.sweep.result import JobResult

_OVERLAP_S = 1.0  # jobs that overlap by less than this number of seconds do not count as concurrent
_NAMED = 3


@dataclass(frozen=True)
class ComparisonRow:
    """One combination of parameters, with its jobs. All jobs of a row ran with the same versions."""

    parameters: dict[str, str]  # the overrides that differ between the jobs of the sweep, by key
    jobs: tuple[JobResult, ...]  # all runs in order, including failed and unfinished runs
    cells: dict[str, Cell] = field(default_factory=dict)  # the values of completed jobs, by metric name
    again: bool = False  # whether this is the A/A row: the first combination, measured twice to show the noise
    error: str = ""  # error of the first failed or else the first unfinished job; empty if all jobs completed
    note: str = ""  # remarks for the reader
    versions: str = ""  # versions of stagereg and torch; empty if all jobs of the sweep have the same versions
    vs_best: float | None = None  # median of the ranking metric divided by the best row's median; `None` if unknown

    @property
    def status(self) -> str:
        """The status: ``"completed"``, ``"failed"``, ``"unfinished"``, or a count such as ``"2 of 3 failed"``."""
        statuses = [job.status for job in self.jobs]
        status = next((each for each in ("failed", "unfinished") if each in statuses), "completed")
        count = statuses.count(status)
        return status if status == "completed" or count == len(statuses) else f"{count} of {len(statuses)} {status}"

    @property
    def label(self) -> str:
        """The combination as Hydra overrides, followed by the versions if the rows have different versions."""
        typed = [f"{name}={parameter_text(value)}" for name, value in self.parameters.items()] or ["as configured"]
        return " ".join([*typed, f"({self.versions})"] if self.versions else typed)

    def verdict(self, name: str) -> str:
        """Return the row's verdict by a metric: "best", "tie", "A/A", "failed", "unfinished" or an empty string."""
        if not self.cells and self.status != "completed":
            return "unfinished" if self.status == "unfinished" else "failed"
        if self.again:
            return "A/A"
        return self.cells[name].verdict if name in self.cells else ""

    def is_candidate(self, name: str) -> bool:
        """Return whether the row may be best by a metric: no job failed, and each completed job has a finite value."""
        statuses, cell = [job.status for job in self.jobs], self.cells.get(name)
        if cell is None or self.again or "failed" in statuses:
            return False
        return len(cell.values) == statuses.count("completed") and cell.is_finite


@dataclass(frozen=True)
class Comparison:
    """The comparison of the jobs of a sweep."""

    directory: Path  # directory of the sweep
    parameters: tuple[str, ...]  # keys of the swept options
    constant: tuple[str, ...]  # overrides that all jobs share, without options of the sweep itself
    metrics: tuple[Metric, ...]  # metrics to show: at least one row has a value, and the values differ
    rows: tuple[ComparisonRow, ...]  # one for each combination, in planned order; the A/A row follows its twin
    repeats: int  # planned runs per combination
    ranking: Metric  # metric that ranks rows, with its direction
    matters: float  # relative difference of the medians of the ranking metric up to which rows tie
    equal: dict[str, float]  # values of the metrics that are the same in all runs, by name
    undecided: frozenset[str]  # names of the metrics by which all rows tie
    warnings: tuple[str, ...] = ()  # reasons to doubt the values

    @property
    def ranked(self) -> list[ComparisonRow]:
        """The rows in display order: best first, rows without a number last, and the A/A row below its twin."""
        name, sign = self.ranking.name, self.ranking.sign

        def position(row: ComparisonRow) -> tuple[int, float]:
            if name in row.cells and math.isfinite(median := row.cells[name].median):
                return 0, sign * median
            return (1 if row.cells else 2), 0.0

        twins = list(_twins(self.rows))
        first = [row for row in self.rows if not any(row is again for _, again in twins)]
        below = {id(twin): [again] for twin, again in twins}
        return [each for row in sorted(first, key=position) for each in (row, *below.get(id(row), ()))]

    @property
    def best(self) -> ComparisonRow | None:
        """The best row by the ranking metric; ``None`` if no row has a finite value in all its runs."""
        return next((row for row in self.rows if row.verdict(self.ranking.name) == "best"), None)

    @property
    def ties(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.verdict(self.ranking.name) == "tie"]


def compare(
    results: Sequence[JobResult],
    metric: str = "stall_ms",
    direction: str | None = None,
    matters: float | str | None = None,
) -> Comparison:
    """Compare the jobs of a sweep.

    Args:
        results: the jobs.
        metric: name of the metric that ranks the rows.
        direction: ``"minimize"`` or ``"maximize"``; ``None`` uses the default direction of the metric.
        matters: relative difference up to which rows tie, such as ``"5%"``. ``None``: 5 % for metrics that stagereg
            measures, 0 for the loss and for values that the task returns.

    Raises:
        ConfigError: There are no jobs, or an argument is invalid.
    """
    ranking, least = directed(metric, direction), least_difference(metric, matters)
    if not results:
        raise ConfigError("There are no jobs to compare.")
    jobs = sorted(results, key=lambda job: job.order)
    parameters = _swept(jobs)
    known = {name for job in jobs if job.status == "completed" for name in job.figures}
    metrics = [ranking if one.name == ranking.name else one for one in columns(known)]
    rows = [_row(group, parameters, versions, metrics, ranking) for versions, group in _groups(jobs)]
    equal = {one.name: value for one in metrics if one != ranking and (value := _equal(rows, one.name)) is not None}
    metrics = [one for one in metrics if one.name not in equal]
    undecided = {one.name for one in metrics if _judge(rows, one, least_difference(one.name, matters))}
    rows = _against_best(rows, ranking)
    return Comparison(
        directory=Path(os.path.commonpath([job.directory.parent for job in jobs]) or "."),
        parameters=parameters,
        constant=tuple(each for each in jobs[0].overrides if by_key([each]).keys() - set(parameters)),
        metrics=tuple(metrics),
        rows=tuple(rows),
        repeats=1 + max(job.repeat for job in jobs),
        ranking=ranking,
        matters=least,
        equal=equal,
        undecided=frozenset(undecided),
        warnings=tuple(_warnings(jobs, rows, ranking)),
    )


def _swept(jobs: Sequence[JobResult]) -> tuple[str, ...]:
    """Return the keys of the overrides in which jobs differ, in order. Jobs with unknown overrides are ignored."""
    known = [keys for job in jobs if (keys := by_key(job.overrides)) or job.status == "completed"]
    names = dict.fromkeys(key for keys in known for key in keys)
    return tuple(name for name in names if len({keys.get(name) for keys in known}) > 1)


def _groups(jobs: Sequence[JobResult]) -> Iterator[tuple[str, list[JobResult]]]:
    """Yield (versions, jobs) of each combination, A/A jobs after their twins. Equal versions give an empty string."""
    known = [job.versions for job in jobs if "stagereg" in job.versions] or [{}]
    differ = [name for name in ("stagereg", "torch") if len({versions.get(name) for versions in known}) > 1]
    groups: defaultdict[tuple[frozenset[tuple[str, str]], str], list[JobResult]] = defaultdict(list)
    for job in jobs:
        # If a job was killed before it recorded its versions, assume the versions of the first job.
        versions = job.versions if "stagereg" in job.versions else known[0]
        text = ", ".join(f"{name} {versions.get(name, 'unknown')}" for name in differ)
        groups[frozenset(by_key(job.overrides).items()), text].append(job)
    for (_, text), group in groups.items():
        for again in (False, True):
            if part := [job for job in group if job.again == again]:
                yield text, part


def _row(
    jobs: Sequence[JobResult], parameters: Sequence[str], versions: str, metrics: Sequence[Metric], ranking: Metric
) -> ComparisonRow:
    keys = by_key(jobs[0].overrides)
    completed = [job for job in jobs if job.status == "completed"]
    cells = {}
    for name in (one.name for one in metrics):
        if known := [job for job in completed if name in job.figures]:
            cells[name] = Cell.of([job.figures[name] for job in known], [job.directory.name for job in known])
    broken = sorted((job for job in jobs if job.status != "completed"), key=lambda job: job.status != "failed")
    return ComparisonRow(
        parameters={name: keys[name] for name in parameters if name in keys},
        jobs=tuple(jobs),
        cells=cells,
        again=jobs[0].again,
        error=broken[0].error or "no error recorded" if broken else "",
        note="; ".join(_notes(completed, ranking)),
        versions=versions,
    )


def _equal(rows: Sequence[ComparisonRow], name: str) -> float | None:
    """Return the value of a metric if all completed runs of all rows have the same value, otherwise ``None``."""
    cells = [row.cells.get(name) for row in rows if row.cells]
    values = {value for cell in cells for value in (cell.values if cell else (math.nan,))}
    return values.pop() if len(cells) > 1 and len(values) == 1 else None


def _judge(rows: Sequence[ComparisonRow], column: Metric, matters: float) -> bool:
    """Set the verdict of each cell of a metric: best or tie. Return whether all cells tie."""
    name = column.name
    candidates = [row.cells for row in rows if row.is_candidate(name)]
    if not column.better or not candidates:
        return False
    best = min(candidates, key=lambda cells: column.sign * cells[name].median)
    rivals = [cells for cells in candidates if cells is not best]
    reasons = ties(best[name], [cells[name] for cells in rivals], matters, _unsteady(rows, name, matters))
    for cells, reason in zip(rivals, reasons, strict=True):
        chance = p_value(best[name].values, cells[name].values)
        cells[name] = replace(cells[name], verdict="tie" if reason else "", reason=reason, chance=chance)
    best[name] = replace(best[name], verdict="best")
    return bool(reasons) and all(reasons)


def _twins(rows: Sequence[ComparisonRow]) -> Iterator[tuple[ComparisonRow, ComparisonRow]]:
    """Yield each pair of a row and its A/A row, which repeats the same combination."""
    for twin, row in itertools.pairwise(rows):
        if row.again and (twin.parameters, twin.versions) == (row.parameters, row.versions):
            yield twin, row


def _unsteady(rows: Sequence[ComparisonRow], name: str, matters: float) -> float:
    """Return the relative difference between a row and its A/A row if it is significant, otherwise 0."""
    pairs = [(twin.cells.get(name), row.cells.get(name)) for twin, row in _twins(rows)]
    finite = [(one, other) for one, other in pairs if one and other and one.is_finite and other.is_finite]
    return max((one.differs_by(other) for one, other in finite if not any(ties(one, [other], matters))), default=0.0)


def _against_best(rows: Sequence[ComparisonRow], ranking: Metric) -> list[ComparisonRow]:
    best = next((row.cells[ranking.name].median for row in rows if row.verdict(ranking.name) == "best"), 0.0)
    cells = [row.cells.get(ranking.name) for row in rows]
    ratios = [cell.median / best if cell and min(best, cell.median) > 0 else None for cell in cells]
    return [replace(row, vs_best=ratio) for row, ratio in zip(rows, ratios, strict=True)]


def _notes(completed: Sequence[JobResult], ranking: Metric) -> Iterator[str]:
    without = sum(ranking.name not in job.figures for job in completed)
    if 0 < without < len(completed):
        yield f"no {ranking.name} in {without} of {len(completed)} runs"
    known = (job.figures.get("lost_checkpoints", 0.0) for job in completed)
    if lost := sum(filter(math.isfinite, known)):
        yield f"{counted(lost, 'failed save')}"
    resumed = (job for job in completed if job.resumed is not None)
    yield from (f"job {job.directory.name} resumed from step {job.resumed}" for job in resumed)


def _warnings(jobs: Sequence[JobResult], rows: Sequence[ComparisonRow], ranking: Metric) -> Iterator[str]:
    if unsteady := _unsteady(rows, ranking.name, 0.0):
        again = next(row for row in rows if row.again)
        yield (
            f"{again.label} and its repetition (A/A) differ significantly, by {percent(unsteady)}: the machine's speed "
            "was not stable. Smaller differences count as ties."
        )
    if mixed := sorted({row.versions for row in rows if row.versions}):
        yield (
            f"The results are of different versions ({few_of(mixed, _NAMED, '; ')}). Each version has its own rows: "
            "differences between these rows may come from the version."
        )
    machines = sorted({_machine(job) for job in jobs if job.status == "completed" and "cpu" in job.environment})
    if len(machines) > 1:
        named = few_of(machines, _NAMED, "; ")
        yield f"The jobs ran on different machines ({named}): differences may come from the machine."
    if (concurrent := _concurrent(jobs)) > 1:
        yield f"Up to {concurrent} jobs ran at the same time on one machine and may have slowed each other down."
    if unfinished := sum(job.status == "unfinished" for job in jobs):
        yield f"Not included in the metrics: {counted(unfinished, 'job')} (killed or still running)."


def _machine(job: JobResult) -> str:
    cores = f"{job.environment.get('cores', 'unknown')} cores"
    return ", ".join(filter(None, (str(job.environment["cpu"]), cores, str(job.environment.get("device") or ""))))


def _concurrent(jobs: Sequence[JobResult]) -> int:
    long = [job for job in jobs if job.seconds > 2 * _OVERLAP_S and job.environment.get("host")]
    most = 0
    for one in long:  # Count at each start of a job, because the number of concurrent jobs only increases there.
        others = [job for job in long if job.environment["host"] == one.environment["host"]]
        most = max(most, sum(job.started <= one.started < job.started + job.seconds - _OVERLAP_S for job in others))
    return most
