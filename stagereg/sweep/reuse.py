"""Finds existing jobs that a new sweep in the same directory can reuse: same combination, repeat and config."""

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
    """The settings of a sweep are invalid. Raised before any job runs."""


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of a sweep directory. A kill releases the lock. Raises ``SweepError`` if another sweep holds it."""
    from stagereg.checkpoint.store.lock import Owner, StoreLock, holder

    folder = directory / LOCKED
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = StoreLock(folder, patience=0)
    except CheckpointError:
        raise SweepError(
            f"{directory} is in use by another sweep, {holder(folder) or Owner()}. Wait until it ends, or choose "
            f"another {DIR}."
        ) from None
    with lock:
        yield


class Reuse:
    """The existing jobs in the directory of a sweep, and the unused job numbers.

    ``changed``: messages about planned jobs that have the overrides of an existing job, but a different config.
    """

    def __init__(self, root: Path) -> None:
        self._found: defaultdict[Identity, list[JobResult]] = defaultdict(list)
        self.changed: list[str] = []
        # The directory may also belong to a single run.
        below = [job for job in jobs_in(root) if job.directory != root]
        for job in sorted(below, key=lambda job: job.status != "completed"):
            self._found[job.identity].append(job)
        taken = {decimal(path.name) for path in root.glob("[0-9]*")} | set(map(_number, below))
        self._free = (number for number in itertools.count() if number not in taken)
        self._used: set[int] = set()

    def find(self, identity: Identity, name: str, config: Mapping[str, str]) -> JobResult | None:
        """Return an existing job with this identity, program ``name`` and config, preferably completed, or ``None``."""
        differences = []
        for job in self._found[identity]:
            program = job.job.get("name", name)
            difference = f"of {program}" if program != name else _difference(job, config)
            if not difference and job.status == "unfinished" and (job.directory / RESULT).exists():
                again = f"Delete {job.directory} to run that job again, or choose another hydra.sweep.dir."
                raise SweepError(f"{job.error} {again}")  # The result file is unreadable.
            if not difference:
                return job
            differences.append(f"job {_number(job)} {difference}")
        self.changed += differences[:1]
        return None

    def number(self, job: JobResult | None) -> int:
        """Return the number of ``job``, or an unused number if ``job`` is ``None`` or its number is already taken."""
        number = _number(job) if job else -1
        if number < 0 or number in self._used:
            number = next(self._free)
        self._used.add(number)
        return number


def expect_own(directory: Path, found: JobResult | None, identity: Identity) -> None:
    """Raise ``SweepError`` if the output directory of a new job already contains a different job."""
    if not is_job(directory) or (found is not None and os.path.samefile(directory, found.directory)):
        return
    other = JobResult.of_directory(directory).identity
    also = " with another config or of another program" if other == identity else ""
    raise SweepError(
        f"{os.path.relpath(directory)} contains {other}{also}, but this sweep would put {identity} there. Choose "
        "another hydra.sweep.dir, or delete that directory."
    )


def flat(node: Any, key: str = "") -> dict[str, str]:
    """Flatten a config: return a dict from dotted keys to values as strings, without options of the sweep itself."""
    if not node or not isinstance(node, (dict, list)):
        return {} if key in SWEEP_KEYS else {key: repr(node)}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {k: v for name, value in items for k, v in flat(value, f"{key}.{name}".lstrip(".")).items()}


def as_saved(config: DictConfig) -> Any:
    """Return the config of a job in the form in which Hydra saves it to a file."""
    task = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])  # type: ignore[misc]
    return OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(task)), resolve=False)


def fingerprint(config: Mapping[str, str]) -> str:
    """Return a hash of a flat config and of the environment variables that the config refers to."""
    named = {name: os.environ.get(name) for text in config.values() for name in _VARIABLE.findall(text)}
    return hashlib.sha256(json.dumps([config, named], sort_keys=True).encode()).hexdigest()[:16]


def _difference(job: JobResult, config: Mapping[str, str]) -> str:
    """Return text that describes one difference between a job's config and ``config``; empty if they agree."""
    file = job.directory / CONFIG
    own = job.job.get("config")
    if not file.exists() and not own:
        return "(its config is unknown)"
    if file.exists() and (content := yaml_of(file)) is None:
        return f"(cannot read its {file.name})"
    before = flat(content) if file.exists() else config
    for key in (*before, *config):
        if before.get(key) != config.get(key):
            return f"({key} changed from {before.get(key, 'absent')} to {config.get(key, 'absent')})"
    return "(an environment variable in its config changed)" if own and own != fingerprint(config) else ""


def _number(job: JobResult) -> int:
    if (number := job.job.get("num")) is None:
        number = decimal(job.directory.name)
    return -1 if number is None else number
