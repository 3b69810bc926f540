"""Which jobs of a sweep are in its directory already: of the same combination, repeat and config, with any number."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from stagereg.base.number_text import decimal
from stagereg.base.overrides import SWEEP_KEYS, Identity
from stagereg.errors import CheckpointError, ConfigError
from stagereg.sweep.files import yaml_of
from stagereg.sweep.plan import DIR, LOCKED
from stagereg.sweep.result import CONFIG, RESULT, JobResult, is_job, jobs_in

_VARIABLE = re.compile(r"oc\.env:\s*(\w+)")


class SweepError(ConfigError, ConfigCompositionException):
    """A sweeper cannot do what it was asked for; it has run no job."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Let no other sweep run in a directory meanwhile; a kill releases it. Raises: ``SweepError`` if one does."""
    from stagereg.checkpoint.store.lock import Owner, StoreLock, holder

    folder = directory / LOCKED
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = StoreLock(folder, patience=0)
    except CheckpointError:
        raise SweepError(
            f"{directory} is in use: another sweep runs there, {holder(folder) or Owner()}. Wait for its end, or take "
            f"another {DIR}."
        ) from None
    with lock:
        yield


class Reuse:
    """The jobs in the directory of a sweep, and the numbers that are free.

    Attributes:
        changed: for each planned job whose overrides another job has, but with another config, what differs.
    """

    def __init__(self, root: Path) -> None:
        self._found: defaultdict[Identity, list[JobResult]] = defaultdict(list)
        self.changed: list[str] = []
        below = [job for job in jobs_in(root) if job.directory != root]  # a single run may have had the directory
        for job in sorted(below, key=lambda job: job.status != "completed"):
            self._found[job.identity].append(job)
        taken = {decimal(path.name) for path in root.glob("[0-9]*")} | set(map(_number, below))
        self._free = (number for number in itertools.count() if number not in taken)
        self._used: set[int] = set()

    def find(self, identity: Identity, name: str, config: Mapping[str, str]) -> JobResult | None:
        """Return the job that ran as this one of the program ``name`` would, if any: the completed one of several."""
        differences = []
        for job in self._found[identity]:
            program = job.job.get("name", name)
            difference = f"of {program}" if program != name else _difference(job, config)
            if not difference and job.status == "unfinished" and (job.directory / RESULT).exists():
                again = f"Delete {job.directory} to run that job again, or take another hydra.sweep.dir."
                raise SweepError(f"{job.error} {again}")  # the result cannot be read
            if not difference:
                return job
            differences.append(f"job {_number(job)} {difference}")
        self.changed += differences[:1]
        return None

    def number(self, job: JobResult | None) -> int:
        """Return the number of a job found, or a free one: for none, and if another job of the plan has the number."""
        number = _number(job) if job else -1
        if number < 0 or number in self._used:
            number = next(self._free)
        self._used.add(number)
        return number


def expect_own(directory: Path, found: JobResult | None, identity: Identity) -> None:
    """Raise ``SweepError`` if the output directory of a job that is to be launched holds another job."""
    if not is_job(directory) or (found is not None and os.path.samefile(directory, found.directory)):
        return
    other = JobResult.of_directory(directory).identity
    also = " with another config or of another program" if other == identity else ""
    raise SweepError(
        f"{os.path.relpath(directory)} holds {other}{also}; this sweep would put {identity} there. Take another "
        "hydra.sweep.dir, or delete it."
    )


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Return the values of a config by their keys, as text, without the options of the sweep itself."""
    if not node or not isinstance(node, (dict, list)):
        return {} if key in SWEEP_KEYS else {key: repr(node)}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {k: v for name, value in items for k, v in flat(value, f"{key}.{name}".lstrip(".")).items()}


def as_saved(config: DictConfig) -> Any:
    """Return the config of a job as Hydra saves it."""
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])  # type: ignore[misc]
    return OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(task)), resolve=False)


def fingerprint(config: Mapping[str, str]) -> str:
    """Return a short text, the same for flat configs of the same values, with their environment variables."""
    named = {name: os.environ.get(name) for text in config.values() for name in _VARIABLE.findall(text)}
    return hashlib.sha256(json.dumps([config, named], sort_keys=True).encode()).hexdigest()[:16]


def _difference(job: JobResult, config: Mapping[str, str]) -> str:
    """Return one difference between the config that a job ran with and another one; empty if there is none."""
    file = job.directory / CONFIG
    own = job.job.get("config")
    if not file.exists() and not own:
        return "(its config is not known)"
    if file.exists() and (content := yaml_of(file)) is None:
        return f"(its {file.name} cannot be read)"
    before = flat(content) if file.exists() else config
    for key in (*before, *config):
        if before.get(key) != config.get(key):
            return f"({key} was {before.get(key, 'absent')}, and is {config.get(key, 'absent')} now)"
    return "(or an environment variable in it)" if own and own != fingerprint(config) else ""


def _number(job: JobResult) -> int:
    if (number := job.job.get("num")) is None:
        number = decimal(job.directory.name)
    return -1 if number is None else number
