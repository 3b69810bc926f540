"""Selects the jobs that a report compares, and the metric that ranks the jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.sweep.comparison import Comparison, compare
from stagereg.sweep.files import yaml_of
from stagereg.sweep.metric import columns, lacking, usual
from stagereg.sweep.metric import metric as metric_of
from stagereg.sweep.number_text import counted
from stagereg.sweep.plan import Plan, Progress
from stagereg.sweep.result import CONFIG, JobResult, kind_of, results


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
