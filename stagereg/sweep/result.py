"""Reads and writes the result of a job, ``result.json`` in its output directory, and finds the jobs in directories.

If a job was killed, or ran without the callback ``compare``, it has no such file; its result is then derived from the
files that Hydra and the ranks wrote. A directory belongs to one run, to one sweep, or to neither.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stagereg.base.number_text import decimal
from stagereg.base.output import json_numbers
from stagereg.base.overrides import Identity, by_key, split
from stagereg.base.record import file_name, plain
from stagereg.base.small_files import replace_small
from stagereg.errors import MALFORMED, ConfigError
from stagereg.sweep.figures import figures
from stagereg.sweep.files import LATEST_TIME, is_whole, json_of, yaml_of
from stagereg.sweep.run import Run

RESULT = "result.json"
FORMAT = 1
CONFIG = Path(".hydra", "config.yaml")  # file in which Hydra saves the config of a job
OVERRIDES = Path(".hydra", "overrides.yaml")
_SWEEP = "multirun.yaml"  # file that Hydra's sweepers write into the directory of a sweep
_MARKS = (file_name(0), RESULT, str(OVERRIDES))  # A directory with one of these files is a job directory.
_INTERRUPTED = ("KeyboardInterrupt", "sys.exit(130)", "sys.exit(138)", "sys.exit(143)")  # errors caused by signals


@dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    directory: Path  # output directory of the job
    status: str = "completed"  # "completed", "failed", or "unfinished" (killed, preempted or still running)
    error: str | None = None  # message of the failure; `None` if the job did not fail
    overrides: tuple[str, ...] = ()  # overrides of the task, without those that only distinguish repeats
    # Hydra's `num` (`None` outside a sweep), `id` and `name` of the job, and `config`, a hash of its config
    job: dict[str, Any] = field(default_factory=dict)
    repeat: int = 0  # which run of its combination this job is, counted from 0
    again: bool = False  # whether this is an A/A job, which repeats a combination to measure the noise
    started: float = 0.0  # start of the job, in seconds since the epoch
    seconds: float = 0.0  # duration of the job
    returned: Any = None  # return value of the task, converted to JSON types
    figures: dict[str, float] = field(default_factory=dict)  # metrics by name, see `stagereg.sweep.figures.figures`
    versions: dict[str, str] = field(default_factory=dict)  # versions of stagereg, torch, hydra-core and python
    environment: dict[str, Any] = field(default_factory=dict)  # the machine, see `stagereg.bench.environment`
    command: str = ""  # command line that runs only this job; empty if unknown
    resumed: int | None = None  # step from which the job resumed; `None` if the job started from scratch

    def write(self) -> Path:
        """Write the result atomically to ``result.json`` in the job's directory. Raises ``OSError``."""
        fields = {name: value for name, value in vars(self).items() if name != "directory"}
        fields["figures"] = json_numbers(self.figures)
        text = json.dumps(plain({"format": FORMAT, **fields, "returned": plain(self.returned)}), indent=1)
        return write_whole(self.directory / RESULT, f"{text}\n".encode())

    @classmethod
    def read(cls, directory: Path | str) -> JobResult:
        path = Path(directory, RESULT)
        try:
            if (content := json_of(path)).pop("format") != FORMAT:
                raise ValueError(f"unsupported format, expected {FORMAT}")
            content["figures"] = {name: _figure(value) for name, value in content["figures"].items()}
            content["overrides"] = tuple(content["overrides"])
            found = cls(path.parent, **content)
            for name, fits in _FITS.items():
                if not fits(value := getattr(found, name)):
                    raise ValueError(f"{name} is {value!r:.100}")
            return found
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
        except MALFORMED as error:
            raise ConfigError(f"{path} is corrupt or was written by another version of stagereg: {error}.") from error

    @classmethod
    def of_directory(cls, directory: Path | str) -> JobResult:
        """Return the result of the job in ``directory``, from its result file or else from the records of its ranks.

        If the result file is unreadable, the job counts as unfinished, and ``error`` contains the reason.
        """
        directory = Path(directory)
        try:
            return cls.read(directory)
        except ConfigError as error:
            trouble = str(error) if (directory / RESULT).exists() else ""
        if not trouble and not is_job(directory):
            raise ConfigError(_nothing_in(directory))
        return _without_result(directory, trouble)

    @property
    def identity(self) -> Identity:
        """What identifies this job in its sweep: its overrides, repeat and A/A flag, but not its number."""
        return Identity(frozenset(by_key(self.overrides).items()), self.repeat, self.again)

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key for the planned order: the job number, then the directory, with ``9`` before ``10``."""
        num, parts = self.job.get("num"), re.split(r"([0-9]+)", str(self.directory))
        parts[1::2] = [f"{len(digits):04}{digits}" for digits in (part.lstrip("0") for part in parts[1::2])]
        return math.inf if num is None else num, parts


def results(sweep_dir: Path | str) -> list[JobResult]:
    """Return the jobs in a sweep's directory, in planned order. Raises ``ConfigError`` if it contains no jobs."""
    if not (jobs := jobs_in(root := Path(sweep_dir))):
        raise ConfigError(_nothing_in(root))
    return jobs


def jobs_in(root: Path) -> list[JobResult]:
    """Return all jobs in a directory and its subdirectories, in planned order. Other sweeps under it are skipped."""
    jobs = []
    for folder, below, _ in os.walk(root):
        path = Path(folder)
        below[:] = [name for name in below if not name.startswith(".")]
        if is_job(path):
            jobs.append(JobResult.of_directory(path))
        if is_job(path) or (path != root and (path / _SWEEP).is_file()):
            below.clear()
    return sorted(jobs, key=lambda job: job.order)


def kind_of(directory: Path) -> Literal["run", "sweep"]:
    """Return whether ``directory`` belongs to a run or to a sweep: a sweep has Hydra's sweep file or numbered jobs."""
    if is_job(directory):
        return "run"
    numbered = (one for one in directory.glob("[0-9]*") if decimal(one.name) is not None)
    if (directory / _SWEEP).is_file() or any(map(is_job, numbered)):
        return "sweep"
    if not directory.exists():
        raise ConfigError(f"The directory {directory} does not exist.")
    raise ConfigError(_nothing_in(directory))


def is_completed(directory: Path | str) -> bool:
    """Return whether ``directory`` contains the result file of a completed job."""
    with contextlib.suppress(ConfigError):
        return JobResult.read(directory).status == "completed"
    return False


def is_job(path: Path) -> bool:
    """Return whether ``path`` is the output directory of a job."""
    return not (path / _SWEEP).is_file() and any((path / name).is_file() for name in _MARKS)


def _nothing_in(path: Path) -> str:
    return (
        f"{path} contains no job: neither this directory nor a folder under it has {RESULT}, {OVERRIDES} or "
        f"{file_name(0)}. Pass the directory of a sweep (hydra.sweep.dir) or of a run (hydra.run.dir)."
    )


def _without_result(directory: Path, trouble: str) -> JobResult:
    given = [each for each in _of(list, yaml_of(directory / OVERRIDES)) if isinstance(each, str)]
    overrides, repeat, again = split(given)
    hydra = _of(dict, _of(dict, yaml_of(directory / ".hydra" / "hydra.yaml")).get("hydra"))
    about = _of(dict, hydra.get("job"))
    job = {name: about[name] for name in ("num", "id", "name") if name in about}
    job |= {} if _names_job(job) else {"num": None}
    known: dict[str, Any] = {"overrides": overrides, "job": job, "repeat": repeat, "again": again}
    try:
        run = Run.read(directory)
    except ConfigError as error:
        return JobResult(directory, "unfinished", trouble or f"killed or still running: {error}", **known)
    interrupted = any(sign in run.error for sign in _INTERRUPTED)
    status = "unfinished" if trouble or interrupted else run.status
    ending = run.error or (None if status == "completed" else "killed or still running")
    known |= {"started": run.began, "seconds": run.seconds, "figures": figures(run)}
    return JobResult(directory, status, trouble or ending, versions=run.versions, environment=run.environment, **known)


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically. If several processes write at the same time, the file of the last one remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_small(path, content, flush=False)
    return path


def _figure(value: Any) -> float:
    """Convert the value of a metric in the file to float. NaN and infinity are strings in the file."""
    if not (value in ("nan", "inf", "-inf") or type(value) in (int, float)):
        raise ValueError(f"a metric is {value!r:.100}")
    return float(value)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LATEST_TIME


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _names_job(value: Any) -> bool:
    return isinstance(value, dict) and (value.get("num") is None or is_whole(value["num"]))


_FITS: dict[str, Callable[[Any], bool]] = {
    "status": lambda value: value in ("completed", "failed", "unfinished"),
    "error": lambda value: value is None or _is_text(value),
    "overrides": lambda value: all(map(_is_text, value)),
    "job": _names_job,
    "repeat": is_whole,
    "again": lambda value: isinstance(value, bool),
    "started": _is_time,
    "seconds": _is_time,
    "versions": lambda value: isinstance(value, dict) and all(map(_is_text, filter(None, value.values()))),
    "environment": lambda value: isinstance(value, dict),
    "command": _is_text,
    "resumed": lambda value: value is None or is_whole(value),
}
"""For each field of a result file, a function that checks its value. Metrics are checked separately."""


def _of(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) else kind()
