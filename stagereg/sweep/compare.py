"""Jobs side by side: one row for each combination of what was swept, and how sure the best is.

Repeats of a combination become their median and the range between their quartiles. A row ties with the best where
their medians differ by no more than either's spread, or in proportion by no more than one combination differs from
itself (the A/A row), or where few runs overlap. Only completed jobs count; a combination that failed in any of its
runs, or has the figure in only some, is never best. The order in which results are given makes no difference.

The figures are defined in :mod:`stagereg.sweep.metric`; the sentence is made in :mod:`stagereg.sweep.answer`,
warnings in ``comparison_warnings``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import stagereg.sweep.comparison_warnings as comparison_warnings
from stagereg.errors import ConfigError
from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow, Tie, noise, tie
from stagereg.sweep.interleaved import KEYS
from stagereg.sweep.metric import METRICS, RETURNED, Metric, directed
from stagereg.sweep.metric import metric as named
from stagereg.sweep.result import JobResult

__all__ = ["compare"]


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
    parameters = _swept(jobs)
    rows = [_row(group, parameters, versions, ranking) for versions, group in _groups(jobs)]
    columns = _columns(rows, ranking)
    return Comparison(
        directory=_directory(jobs),
        parameters=parameters,
        constant=tuple(each for each in jobs[0].overrides if _by_key([each]).keys() - set(parameters)),
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


def _directory(jobs: Sequence[JobResult]) -> Path:
    """The folder that all jobs are in."""
    parents = [job.directory.parent for job in jobs]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.absolute() for parent in parents]
    return Path(os.path.commonpath(parents) or ".")


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
        best = min(candidates, key=lambda at: column.sign * rows[at].cells[name].median)
        chance = noise(rows, name)
        ties = {at: tie(rows[best].cells[name], rows[at].cells[name], chance) for at in candidates if at != best}
        if ties and set(ties.values()) == {Tie.EQUAL} and name != ranking.name:
            continue
        verdicts[best][name] = "best"
        for at, why in ties.items():
            verdicts[at][name] = "tie" if why else ""
    for row, found in zip(rows, verdicts, strict=True):
        cells = {name: replace(cell, verdict=found.get(name, "")) for name, cell in row.cells.items()}
        yield replace(row, cells=cells)
