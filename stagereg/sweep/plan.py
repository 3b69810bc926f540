"""The plan of a sweep: the file ``sweep.json`` in the sweep's directory, which lists the jobs of the newest sweep.

``hydra/sweeper=interleaved`` writes the plan before the first job. A comparison includes only the jobs of the plan, not
jobs of earlier sweeps in the same directory. The process of a running sweep holds a lock.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stagereg.base.overrides import Identity, quoted
from stagereg.base.record import plain
from stagereg.errors import MALFORMED, ConfigError
from stagereg.launch.command_line import CommandLine
from stagereg.sweep.files import is_whole, json_of
from stagereg.sweep.number_text import duration
from stagereg.sweep.result import OVERRIDES, RESULT, JobResult, write_whole

PLAN = "sweep.json"
FORMAT = 1
LOCKED = ".sweep"  # subdirectory with the lock of a running sweep, apart from checkpoints in the sweep's directory
DIR = "hydra.sweep.dir"


@dataclass(frozen=True)
class PlannedJob:
    """A job in the plan of a sweep."""

    num: int  # Hydra's job number
    directory: str  # output directory; relative if it is in the directory of the sweep
    overrides: tuple[str, ...]  # overrides of the task, including those that only distinguish repeats
    kept: bool = False  # whether an earlier sweep completed the job, so that it is not launched again


@dataclass(frozen=True)
class Progress:
    """The number of jobs of a sweep in each state."""

    planned: int
    completed: int
    failed: int
    begun: int  # number of jobs that are running, or that were stopped
    runs: bool  # whether the sweep is still running

    @property
    def not_started(self) -> int:
        return self.planned - self.completed - self.failed - self.begun

    @property
    def text(self) -> str:
        """A summary, such as ``2 of 7 completed, 1 running, 4 not started``."""
        begun = self.begun, "running" if self.runs else "stopped"
        counts = (self.failed, "failed"), begun, (self.not_started, "not started")
        return ", ".join([f"{self.completed} of {self.planned} completed", *(f"{n} {what}" for n, what in counts if n)])


@dataclass(frozen=True)
class Plan:
    """The plan of the newest sweep in a directory."""

    root: Path  # directory of the sweep
    jobs: tuple[PlannedJob, ...]  # all jobs in launch order
    command: str = ""  # command line that runs the remaining jobs
    began: float = field(default_factory=time.time)  # start of the sweep, in seconds since the epoch
    metric: str | None = None  # ranking metric, as configured
    direction: str | None = None
    matters: float | str | None = None

    @classmethod
    def read(cls, directory: Path | str) -> Plan | None:
        """Read the plan in a directory. Return ``None`` if there is no plan file.

        Raises ``ConfigError`` if the file is unreadable, because a comparison without it could mix several sweeps.
        """
        path = Path(directory, PLAN)
        try:
            if (content := json_of(path)).pop("format") != FORMAT:
                raise ValueError(f"unsupported format, expected {FORMAT}")
            jobs = (PlannedJob(**{**job, "overrides": tuple(job["overrides"])}) for job in content.pop("jobs"))
            found = cls(path.parent, tuple(jobs), **content)
            found._expect_right()
            return found
        except FileNotFoundError:
            return None
        except (OSError, *MALFORMED) as error:
            raise ConfigError(
                f"cannot read the plan of the newest sweep, {path}: {error}. Move or delete this file to compare all "
                "jobs in the directory."
            ) from error

    def _expect_right(self) -> None:
        """Raise ``ValueError`` if a field that was read from a file has an invalid type or value."""
        texts = [self.command, *filter(None, (self.metric, self.direction))]
        texts += [text for job in self.jobs for text in (job.directory, *job.overrides)]
        if not all(isinstance(text, str) for text in texts) or not all(is_whole(job.num) for job in self.jobs):
            raise ValueError("a text or a job number has the wrong type")
        if not isinstance(self.began, (int, float)) or not isinstance(self.matters, (int, float, str, type(None))):
            raise ValueError("began or matters has the wrong type")
        if any("\0" in os.fsdecode(os.fsencode(job.directory)) for job in self.jobs):
            raise ValueError("a directory is not a path")

    def write(self) -> None:
        """Write the plan to the sweep's directory. Raises ``OSError``."""
        fields = {name: value for name, value in asdict(self).items() if name != "root"}
        write_whole(self.root / PLAN, f"{json.dumps({'format': FORMAT, **plain(fields)}, indent=1)}\n".encode())

    def select(self, jobs: Iterable[JobResult]) -> list[JobResult]:
        """Return those of ``jobs`` that belong to this sweep."""
        planned = {os.path.realpath(self.root / job.directory): Identity.of(job.overrides) for job in self.jobs}

        def has(job: JobResult) -> bool:
            identity = planned.get(os.path.realpath(job.directory))
            unknown = not job.overrides and job.status != "completed"  # killed before Hydra wrote the overrides
            return identity is not None and (unknown or identity == job.identity)

        return [job for job in jobs if has(job)]

    def progress(self, jobs: Sequence[JobResult]) -> Progress:
        """Return the number of jobs of this sweep in each state. ``jobs``: all jobs in the directory."""
        from stagereg.checkpoint.store.lock import holder

        own, runs = self.select(jobs), holder(self.root / LOCKED) is not None  # a running sweep holds the lock
        states = Counter(job.status for job in own if not runs or job.status != "unfinished" or self._launched(job))
        return Progress(len(self.jobs), states["completed"], states["failed"], states["unfinished"], runs)

    def position(self, num: int) -> str:
        """Return a line about the job ``num``, which starts now: ``Job 4 of 9, about 1 min 10 s left.``"""
        launched = [job for job in self.jobs if not job.kept]
        place = len(self.jobs) - len(launched) + [job.num for job in launched].index(num) + 1
        done = sum(self._wrote(self.root / job.directory / RESULT) for job in launched)
        left = (time.time() - self.began) / done * (len(launched) - done) if done else 0.0
        return f"Job {place} of {len(self.jobs)}{f', about {duration(left)} left' if done else ''}."

    def _launched(self, job: JobResult) -> bool:
        """Return whether this sweep launched the job, that is, whether its overrides were written after ``began``."""
        return self._wrote(job.directory / OVERRIDES) or not (job.directory / OVERRIDES).exists()

    def _wrote(self, file: Path) -> bool:
        return file.exists() and file.stat().st_mtime >= self.began


def command_to_continue(sweep_dir: str) -> str:
    """Return a shell command that repeats this process's command line with the same sweep directory."""
    command, own = CommandLine.of_this_process(), sys.argv[1:]
    given = [each.partition("=")[2] for each in own if each.lstrip("+").startswith(f"{DIR}=")]
    if given[-1:] not in ([sweep_dir], [quoted(sweep_dir)]):
        is_plain = re.fullmatch(r"[\w./-]+", sweep_dir)
        own = [*own, f"{DIR}={sweep_dir if is_plain else quoted(sweep_dir)}"]
    return shlex.join([sys.orig_argv[0], *command.start[1:], *own])
