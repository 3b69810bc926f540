"""The plan of a sweep: ``sweep.json`` in the directory of the sweep, with the jobs of the newest sweep there.

``hydra/sweeper=interleaved`` writes it before the first job. A directory may hold jobs of earlier sweeps too: only the
jobs of the plan are compared. While the sweep runs, its process holds a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from hydra.errors import ConfigCompositionException

from stagereg.errors import CheckpointError, ConfigError
from stagereg.launch.command_line import CommandLine, Identity, quoted
from stagereg.record import plain
from stagereg.sweep.result import OVERRIDES, RESULT, JobResult

PLAN = "sweep.json"
FORMAT = 1
_LOCKED = ".sweep"  # the folder that a running sweep locks; checkpoints may be in the directory of the sweep itself
_DIR = "hydra.sweep.dir"


class SweepError(ConfigError, ConfigCompositionException):
    """A sweeper cannot do what it was asked for; it has run no job."""


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep."""

    num: int  # the number that Hydra gives it
    directory: str  # its output directory; relative to the directory of the sweep if it is below it
    overrides: tuple[str, ...]  # of the task, with those that only distinguish repeats
    kept: bool = False  # an earlier sweep completed it, so this sweep does not launch it

    @property
    def identity(self) -> Identity:
        return Identity.of(self.overrides)


@dataclass(frozen=True)
class Progress:
    """How many jobs of a sweep have come how far."""

    planned: int
    completed: int
    failed: int
    begun: int  # neither completed nor failed: running, or stopped
    runs: bool  # whether the sweep runs at this moment

    @property
    def not_started(self) -> int:
        return self.planned - self.completed - self.failed - self.begun

    @property
    def text(self) -> str:
        """Such as ``2 of 7 completed, 1 running, 4 not started``."""
        counts = [(self.failed, "failed"), (self.begun, "running" if self.runs else "stopped")]
        counts.append((self.not_started, "not started"))
        more = [f"{count} {name}" for count, name in counts if count]
        return ", ".join([f"{self.completed} of {self.planned} completed", *more])


@dataclass(frozen=True)
class Plan:
    """The newest sweep in a directory."""

    root: Path  # the directory of the sweep
    jobs: tuple[PlannedJob, ...]  # in the order in which they are launched
    command: str = ""  # the command line that runs the jobs that are not completed
    began: float = field(default_factory=time.time)  # seconds since the epoch
    metric: str | None = None  # what the sweep ranks by, as given
    direction: str | None = None
    matters: float | str | None = None

    @classmethod
    def read(cls, directory: Path | str) -> Plan | None:
        """Return the plan of the newest sweep in a directory, ``None`` if no sweeper has left one.

        Raises: ``ConfigError`` if it cannot be read, as ranking would mix sweeps.
        """
        path = Path(directory, PLAN)
        try:
            content = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            jobs = (PlannedJob(**{**job, "overrides": tuple(job["overrides"])}) for job in content.pop("jobs"))
            return cls(path.parent, tuple(jobs), **content)
        except FileNotFoundError:
            return None
        except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. It lists the jobs of the newest sweep. Run that sweep again, or "
                "delete the file to compare all jobs in the directory."
            ) from error

    def write(self) -> None:
        """Write it into the directory of the sweep, completely or not at all. Raises: ``OSError``."""
        fields = {name: value for name, value in asdict(self).items() if name != "root"}
        temporary = self.root / f".{PLAN}.tmp"
        temporary.write_text(json.dumps({"format": FORMAT, **plain(fields)}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.root / PLAN)

    def select(self, jobs: Iterable[JobResult]) -> tuple[list[JobResult], list[JobResult]]:
        """Part jobs in the directory into those of this sweep, and the others, which it does not compare."""
        own: list[JobResult] = []
        others: list[JobResult] = []
        for job in jobs:
            planned = self._by_directory.get(os.path.realpath(job.directory))
            unknown = not job.overrides and job.status != "completed"  # killed before Hydra wrote the overrides
            is_own = planned is not None and (unknown or planned.identity == job.identity)
            (own if is_own else others).append(job)
        return own, others

    def progress(self, jobs: Sequence[JobResult]) -> Progress:
        """Count the jobs of this sweep among those found in its directory."""
        own, runs = self.select(jobs)[0], self.runs
        states = [job.status for job in own]
        unfinished = [job for job in own if job.status == "unfinished"]
        begun = len(unfinished) if not runs else sum(self._launched(job.directory) for job in unfinished)
        return Progress(len(self.jobs), states.count("completed"), states.count("failed"), begun, runs)

    def position(self, num: int) -> str:
        """Return such as ``Job 4 of 9, about 1 min 10 s left.``, for a job of this sweep that begins now."""
        launched = [job for job in self.jobs if not job.kept]
        place = len(self.jobs) - len(launched) + [job.num for job in launched].index(num) + 1
        done = sum(self._ended(job) for job in launched)
        left = (time.time() - self.began) / done * (len(launched) - done) if done else None
        return f"Job {place} of {len(self.jobs)}{'' if left is None else f', about {duration(left)} left'}."

    @property
    def runs(self) -> bool:
        """Whether the sweep runs at this moment, by its lock."""
        from stagereg.checkpoint.store.lock import holder

        return holder(self.root / _LOCKED) is not None

    @cached_property
    def _by_directory(self) -> dict[str, PlannedJob]:
        return {os.path.realpath(self.root / job.directory): job for job in self.jobs}

    def _launched(self, directory: Path) -> bool:
        """Whether this sweep has launched the job, and not only an earlier one: Hydra then writes the overrides."""
        file = directory / OVERRIDES
        return not file.exists() or file.stat().st_mtime >= self.began

    def _ended(self, job: PlannedJob) -> bool:
        try:
            return (self.root / job.directory / RESULT).stat().st_mtime >= self.began
        except OSError:
            return False


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Let no other sweep run in a directory meanwhile; a kill releases it. Raises: ``SweepError`` if one does."""
    from stagereg.checkpoint.store.lock import Owner, StoreLock, holder

    folder = directory / _LOCKED
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = StoreLock(folder, patience=0)
    except CheckpointError:
        raise SweepError(
            f"{directory} is in use: another sweep runs there, {holder(folder) or Owner()}. Wait for its end, or take "
            f"another {_DIR}."
        ) from None
    with lock:
        yield


def command_to_continue(sweep_dir: str) -> str:
    """Return this process's command line, so that it works as printed and uses the same directory again."""
    command, own = CommandLine.of_this_process(), sys.argv[1:]
    given = [each.partition("=")[2] for each in own if each.lstrip("+").startswith(f"{_DIR}=")]
    plain_path = re.fullmatch(r"[\w./-]+", sweep_dir)
    if given[-1:] not in ([sweep_dir], [quoted(sweep_dir)]):
        own = [*own, f"{_DIR}={sweep_dir if plain_path else quoted(sweep_dir)}"]
    return shlex.join([sys.orig_argv[0], *command.start[1:], *own])


def duration(seconds: float) -> str:
    """Return such as ``45 s``, ``1 min 10 s`` and ``2 h 5 min``."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    parts = (minutes // 60, "h"), (minutes % 60, "min"), (rest, "s")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)
