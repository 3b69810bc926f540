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
from collections.abc import Iterator, Mapping, Sequence
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
        chance = noise(rows, name)
        ties = {at: tie(rows[best].cells[name], rows[at].cells[name], chance) for at in candidates if at != best}
        if ties and set(ties.values()) == {Tie.EQUAL} and name != ranking.name:
            continue
        verdicts[best][name] = "best"
        for at in (at for at, why in ties.items() if why):
            verdicts[at][name] = "tie"
    for row, found in zip(rows, verdicts, strict=True):
        cells = {name: replace(cell, verdict=found.get(name, "")) for name, cell in row.cells.items()}
        yield replace(row, cells=cells)


def _directory(jobs: Sequence[JobResult]) -> Path:
    """The folder that all jobs are in."""
    parents = [job.directory.parent for job in jobs]
    if len({parent.is_absolute() for parent in parents}) > 1:
        parents = [parent.absolute() for parent in parents]
    return Path(os.path.commonpath(parents) or ".")
