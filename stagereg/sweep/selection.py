"""The jobs that a report compares, of one directory or of several, and the metric that ranks them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.sweep.comparison import Comparison, compare
from stagereg.sweep.metric import DIRECTIONS, columns, counted, lacking, usual
from stagereg.sweep.metric import metric as metric_of
from stagereg.sweep.plan import Plan, Progress
from stagereg.sweep.result import CONFIG, JobResult, kind_of, results

_COLUMN = "sweep"  # parameter that has the directory, if jobs of several are compared


@dataclass(frozen=True)
class _Source:
    """One directory with jobs, and the settings of their sweep."""

    directory: Path
    jobs: tuple[JobResult, ...]
    metric: str
    chosen: bool  # whether the sweep was given the metric
    direction: str | None
    matters: float | str | None
    plan: Plan | None = None
    progress: Progress | None = None
    others: int = 0  # jobs in the directory that are not of its newest sweep

    @property
    def notes(self) -> Iterator[str]:
        """Warnings about a sweep that is not complete, or that shares its directory with earlier sweeps."""
        if self.plan and self.progress and (self.progress.begun or self.progress.not_started):
            advice = "" if self.progress.runs else f" This command continues it: {self.plan.command}"
            yield f"The sweep in {self.directory} is not complete: {self.progress.text}.{advice}"
        if self.others:
            yield f"Not compared: {counted(self.others, 'job')} of earlier sweeps in {self.directory}."

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"directory": self.directory, "others": self.others, "progress": None}
        if self.plan and self.progress:
            found |= {"command": self.plan.command, "progress": asdict(self.progress)}
            found["progress"]["not_started"] = self.progress.not_started
        return found


def compared(
    directories: Sequence[Path],
    metric: str = "",
    direction: str | None = None,
    matters: float | str | None = None,
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Compare the jobs of directories, each of which holds a sweep or a single run; of a sweep, the newest one there.

    Returns the comparison, and for each directory how far its sweep is, as values for JSON.

    Args:
        directories: one or several; of several, the first parameter of a row is ``sweep``, a short name of its
            directory.
        metric: ranks the jobs; empty for the metric of the sweeps.
        direction: ``None`` for the direction of the sweeps if ``metric`` is their metric, otherwise the metric's own.
        matters: as :func:`~stagereg.sweep.comparison.compare` takes it; ``None`` for the sweeps', if they agree.

    Raises:
        ConfigError: if jobs cannot be read, or completed jobs cannot be ranked by ``metric``.
    """
    several = len(directories) > 1
    sources = [_source(Path(os.path.abspath(each)) if several else each) for each in directories]
    names = _short_names([source.directory for source in sources])
    jobs = [job for source in sources for job in source.jobs]
    if several:
        jobs = [_named(job, name) for source, name in zip(sources, names, strict=True) for job in source.jobs]
    ranking, direction = _ranking(sources, names, metric, direction)
    completed = [job for job in jobs if job.status == "completed"]
    known = {name for job in completed for name in job.figures}
    chosen = metric or any(source.chosen for source in sources)
    if completed and chosen and metric_of(ranking).name not in known:
        advice = " --metric NAME ranks by another one." if columns(known) else ""
        where = " or ".join(map(str, directories))
        raise ConfigError(lacking(f"No completed job in {where} has", ranking, known) + advice)
    own = {source.matters for source in sources} if matters is None else {matters}
    comparison = compare(jobs, ranking, direction, own.pop() if len(own) == 1 else None)
    notes = [note for source in sources for note in source.notes]
    comparison = replace(comparison, warnings=(*comparison.warnings, *notes))
    return comparison, [source.plain() for source in sources]


def _source(directory: Path) -> _Source:
    found = [JobResult.of_directory(directory)] if kind_of(directory) == "run" else results(directory)
    if (plan := Plan.read(directory)) is None:
        (metric, direction, matters), jobs, progress = _settings(found), found, None
    else:
        metric, direction, matters = plan.metric, plan.direction, plan.matters
        (jobs, _), progress = plan.select(found), plan.progress(found)
        if not jobs:
            raise ConfigError(f"No job of the newest sweep in {directory} has started: {progress.text}.")
    ranking = metric or usual({name for job in jobs for name in job.figures})
    others = len(found) - len(jobs)
    return _Source(directory, tuple(jobs), ranking, bool(metric), direction, matters, plan, progress, others)


def _settings(jobs: Sequence[JobResult]) -> tuple[Any, Any, Any]:
    """The metric, direction and ``matters`` of a sweep without a plan, by the config of its first job."""
    from omegaconf import OmegaConf

    for job in jobs:
        with contextlib.suppress(Exception):  # whatever YAML and OmegaConf raise for a torn file
            config = OmegaConf.load(job.directory / CONFIG)
            if OmegaConf.is_dict(OmegaConf.select(config, "sweep")):
                metric, direction, matters = (
                    OmegaConf.select(config, f"sweep.{name}") for name in ("metric", "direction", "matters")
                )
                return metric, direction, matters
    return None, None, None


def _ranking(
    sources: Sequence[_Source], names: Sequence[str], metric: str, direction: str | None
) -> tuple[str, str | None]:
    own = {source.metric for source in sources}
    if not metric and len(own) > 1:
        which = ", ".join(f"{name} by {source.metric}" for name, source in zip(names, sources, strict=True))
        raise ConfigError(f"The sweeps are ranked by different metrics ({which}): choose one with --metric NAME.")
    metric = metric or own.pop()
    given = [source.direction or "" for source in sources if source.metric == metric]
    sides = {DIRECTIONS.get(each, metric_of(metric).better) for each in given}
    if direction is None and len(sides - {""}) > 1:
        raise ConfigError(
            f"The sweeps are ranked by {metric} in different directions: choose --direction minimize or maximize."
        )
    return metric, direction or next(filter(None, given), None)


def _short_names(directories: Sequence[Path]) -> list[str]:
    """Of each path as many of the last names as tell it from the others."""
    for each, other in itertools.combinations(directories, 2):
        one, two = each.resolve(), other.resolve()
        if one.is_relative_to(two) or two.is_relative_to(one):
            raise ConfigError(f"{each} and {other} have the same jobs: name each job once.")
    names = []
    for each in directories:
        others = [other.parts for other in directories if other is not each]
        depth = next(at for at in itertools.count(1) if all(each.parts[-at:] != other[-at:] for other in others))
        names.append(str(Path(*each.parts[-depth:])))
    return names


def _named(job: JobResult, name: str) -> JobResult:
    own = [override for override in job.overrides if override.lstrip("+").partition("=")[0] != _COLUMN]
    return replace(job, overrides=(f"{_COLUMN}={name}", *own))
