"""Selects the jobs that a report compares, and the metric that ranks the jobs.

Several sweeps are reported as one sweep, with a parameter ``sweep``, the name of the directory, in each job.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.sweep.comparison import Comparison, compare
from stagereg.sweep.files import yaml_of
from stagereg.sweep.metric import DIRECTIONS, columns, lacking, usual
from stagereg.sweep.metric import metric as metric_of
from stagereg.sweep.number_text import counted
from stagereg.sweep.plan import Plan, Progress
from stagereg.sweep.result import CONFIG, JobResult, kind_of, results

_COLUMN = "sweep"  # name of the parameter that is added if a report has several sweeps


@dataclass(frozen=True)
class Source:
    """The jobs in a directory: those of the newest sweep, or a single run."""

    directory: Path
    jobs: tuple[JobResult, ...]
    plan: Plan  # settings of the sweep; contains no jobs if there is no plan file
    progress: Progress | None  # `None` if there is no plan file
    others: int  # number of jobs of earlier sweeps in the directory

    @classmethod
    def of(cls, directory: Path) -> Source:
        found = [JobResult.of_directory(directory)] if kind_of(directory) == "run" else results(directory)
        if (plan := Plan.read(directory)) is None:
            return cls(directory, tuple(found), Plan(directory, (), **_settings(found)), None, 0)
        jobs, progress = plan.select(found), plan.progress(found)
        if not jobs:
            raise ConfigError(f"No job of the newest sweep in {directory} has started: {progress.text}")
        return cls(directory, tuple(jobs), plan, progress, len(found) - len(jobs))

    @property
    def metric(self) -> str:
        return self.plan.metric or usual({name for job in self.jobs for name in job.figures})

    @property
    def notes(self) -> Iterator[str]:
        """Warnings if the sweep is not complete, or if its directory contains jobs of earlier sweeps."""
        if self.progress and (self.progress.begun or self.progress.not_started):
            advice = "" if self.progress.runs else f" Continue the sweep with: {self.plan.command}"
            yield f"The sweep in {self.directory} is not complete: {self.progress.text}.{advice}"
        if self.others:
            yield f"Not compared: {counted(self.others, 'job')} of earlier sweeps in {self.directory}."


def read_sources(directories: Sequence[Path], metric: str = "", direction: str | None = None) -> list[Source]:
    """Read directories, each with a sweep or a single run. If there are several, add ``sweep`` to each job.

    Raises:
        ConfigError: Jobs cannot be read, or the sweeps differ in a metric or direction that the caller did not pass.
    """
    if len(directories) == 1:
        return [Source.of(directories[0])]
    found = [Source.of(Path(os.path.abspath(each))) for each in directories]
    names = _short_names([source.directory for source in found])
    if not metric and len({source.metric for source in found}) > 1:
        which = ", ".join(f"{name} by {source.metric}" for name, source in zip(names, found, strict=True))
        raise ConfigError(f"The sweeps are ranked by different metrics ({which}). Choose one with --metric NAME.")
    ranking = metric or found[0].metric
    own = [source.plan.direction or "" for source in found if source.metric == ranking]
    if direction is None and len({DIRECTIONS.get(each, metric_of(ranking).better) for each in own} - {""}) > 1:
        text = f"The sweeps rank {ranking} in different directions. Pass --direction minimize or --direction maximize."
        raise ConfigError(text)
    pairs = zip(found, names, strict=True)
    return [replace(source, jobs=tuple(_named(job, name) for job in source.jobs)) for source, name in pairs]


def _short_names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffix of each path. Raises: ``ConfigError`` if a directory contains another one."""
    for each, other in itertools.combinations(directories, 2):
        one, two = each.resolve(), other.resolve()
        if one.is_relative_to(two) or two.is_relative_to(one):
            raise ConfigError(f"{each} and {other} contain the same jobs. Name each job once.")
    names = []
    for each in directories:
        others = [other.parts for other in directories if other is not each]
        depth = next(at for at in itertools.count(1) if all(each.parts[-at:] != other[-at:] for other in others))
        names.append(str(Path(*each.parts[-depth:])))
    return names


def _named(job: JobResult, name: str) -> JobResult:
    own = [override for override in job.overrides if override.lstrip("+").partition("=")[0] != _COLUMN]
    return replace(job, overrides=(f"{_COLUMN}={name}", *own))


def compared(
    sources: Sequence[Source], metric: str = "", direction: str | None = None, matters: float | str | None = None
) -> Comparison:
    """Compare the jobs of one or more directories. Default settings are those of the sweeps in these directories.

    Args:
        sources: the jobs of each directory.
        metric: the metric that ranks the jobs; empty uses the metric of the sweeps.
        direction: ``None`` uses the direction of the sweeps if they have the same metric, or else the metric's default.
        matters: see :func:`~stagereg.sweep.comparison.compare`. ``None`` uses the value of the sweeps, if all agree.

    Raises:
        ConfigError: no completed job has a value of the metric.
    """
    ranking = metric or sources[0].metric
    given = [source.plan.direction for source in sources if source.metric == ranking]
    jobs = [job for source in sources for job in source.jobs]
    completed = [job for job in jobs if job.status == "completed"]
    known = {name for job in completed for name in job.figures}
    chosen = metric or any(source.plan.metric for source in sources)
    if completed and chosen and metric_of(ranking).name not in known:
        advice = " Choose another metric with --metric NAME." if columns(known) else ""
        where = " or ".join(str(source.directory) for source in sources)
        raise ConfigError(lacking(f"No completed job in {where} has", ranking, known) + advice)
    own = {source.plan.matters for source in sources} if matters is None else {matters}
    direction = direction or next(filter(None, given), None)
    comparison = compare(jobs, ranking, direction, own.pop() if len(own) == 1 else None)
    notes = [note for source in sources for note in source.notes]
    return replace(comparison, warnings=(*comparison.warnings, *notes))


def _settings(jobs: Sequence[JobResult]) -> dict[str, Any]:
    """Return metric, direction and ``matters`` of a sweep without a plan file, from the config of the first job."""
    configs = (yaml_of(job.directory / CONFIG) for job in jobs)
    sweeps = (config.get("sweep") for config in configs if isinstance(config, dict))
    sweep = next((each for each in sweeps if isinstance(each, dict)), {})
    settings = {name: sweep.get(name) for name in ("metric", "direction", "matters")}
    return {name: str(value) if isinstance(value, (dict, list)) else value for name, value in settings.items()}
