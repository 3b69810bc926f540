"""Reports several sweeps as one sweep. Adds a parameter ``sweep``, the name of the directory, to each job."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagereg.errors import ConfigError
from stagereg.sweep.metric import DIRECTIONS
from stagereg.sweep.metric import metric as metric_of
from stagereg.sweep.result import JobResult
from stagereg.sweep.selection import Source

_COLUMN = "sweep"  # name of the added parameter


def sources(directories: Sequence[Path], metric: str = "", direction: str | None = None) -> list[Source]:
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
        raise ConfigError(
            f"The sweeps rank {ranking} in different directions. Pass --direction minimize or --direction maximize."
        )
    return [
        replace(source, jobs=tuple(_named(job, name) for job in source.jobs))
        for source, name in zip(found, names, strict=True)
    ]


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
