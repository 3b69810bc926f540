"""What one job of a sweep leaves behind, ``result.json`` in its output directory, and how jobs are found.

A job without the file was killed, or no comparison ran; what can be known of it is taken from what Hydra and the ranks
have left. A directory is a run, a sweep, or neither. Reading never changes anything.
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
CONFIG = Path(".hydra", "config.yaml")  # what a job was configured with, as Hydra leaves it in the job's directory
OVERRIDES = Path(".hydra", "overrides.yaml")
_SWEEP = "multirun.yaml"  # Hydra's sweepers leave it in the directory of a sweep
_MARKS = (file_name(0), RESULT, str(OVERRIDES))  # files that make a folder a job's
_INTERRUPTED = ("KeyboardInterrupt", "sys.exit(130)", "sys.exit(138)", "sys.exit(143)")  # no faults of the job


@dataclass(frozen=True)
class JobResult:
    """How one job went."""

    directory: Path  # its output directory
    status: str = "completed"  # or `"failed"`, or `"unfinished"`: killed half-way, preempted, or still running
    error: str | None = None  # why it failed, or `None`
    overrides: tuple[str, ...] = ()  # of the task, as they were given; without those that only distinguish repeats
    # Hydra's `num` (`None` outside of a sweep), `id` and `name`; as `config` the fingerprint of its config
    job: dict[str, Any] = field(default_factory=dict)
    repeat: int = 0  # which run of its combination this is, from 0 on
    again: bool = False  # whether it runs the first combination once more, as if it were another one
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0  # how long it took
    returned: Any = None  # what the task returned, as JSON has it
    figures: dict[str, float] = field(default_factory=dict)  # by name, see `stagereg.sweep.figures.figures`
    versions: dict[str, str] = field(default_factory=dict)  # of stagereg, torch, hydra-core and python
    environment: dict[str, Any] = field(default_factory=dict)  # what it ran on, see `stagereg.bench.environment`
    command: str = ""  # the command line that runs this job alone; empty if unknown
    resumed: int | None = None  # the step that it resumed from; `None` if it began at the beginning

    def write(self) -> Path:
        """Write it into its directory, completely or not at all. Raises: ``OSError``."""
        fields = {name: value for name, value in vars(self).items() if name != "directory"}
        fields["figures"] = json_numbers(self.figures)
        text = json.dumps(plain({"format": FORMAT, **fields, "returned": plain(self.returned)}), indent=1)
        return write_whole(self.directory / RESULT, f"{text}\n".encode())

    @classmethod
    def read(cls, directory: Path | str) -> JobResult:
        path = Path(directory, RESULT)
        try:
            if (content := json_of(path)).pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            content["figures"] = {name: _figure(value) for name, value in content["figures"].items()}
            content["overrides"] = tuple(content["overrides"])
            found = cls(path.parent, **content)
            for name, fits in _FITS.items():
                if not fits(value := getattr(found, name)):
                    raise ValueError(f"{name} is {value!r:.100}")
            return found
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except MALFORMED as error:
            raise ConfigError(f"{path} is damaged, or of another version of stagereg: {error}.") from error

    @classmethod
    def of_directory(cls, directory: Path | str) -> JobResult:
        """What is known of the job that ran in ``directory``: by its result, or else by the records of its ranks.

        A job whose result cannot be read is unfinished; its error has the reason.
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
        """What tells this job from the others of a sweep, whatever its number is."""
        return Identity(frozenset(by_key(self.overrides).items()), self.repeat, self.again)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts jobs as they were planned: by number, then by directory, ``9`` before ``10``."""
        num, parts = self.job.get("num"), re.split(r"([0-9]+)", str(self.directory))
        parts[1::2] = [f"{len(digits):04}{digits}" for digits in (part.lstrip("0") for part in parts[1::2])]
        return math.inf if num is None else num, parts


def results(sweep_dir: Path | str) -> list[JobResult]:
    """As :func:`jobs_in`. Raises: ``ConfigError`` if there are none."""
    if not (jobs := jobs_in(root := Path(sweep_dir))):
        raise ConfigError(_nothing_in(root))
    return jobs


def jobs_in(root: Path) -> list[JobResult]:
    """Every job in or below a directory, in the order they were planned; other sweeps below it are left out."""
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
    """Return which of the two ``directory`` is: a sweep has the file of Hydra, or jobs with numbers."""
    if is_job(directory):
        return "run"
    numbered = (one for one in directory.glob("[0-9]*") if decimal(one.name) is not None)
    if (directory / _SWEEP).is_file() or any(map(is_job, numbered)):
        return "sweep"
    if not directory.exists():
        raise ConfigError(f"There is no directory {directory}.")
    raise ConfigError(_nothing_in(directory))


def is_completed(directory: Path | str) -> bool:
    """Whether a directory has the result of a completed job."""
    with contextlib.suppress(ConfigError):
        return JobResult.read(directory).status == "completed"
    return False


def is_job(path: Path) -> bool:
    """Whether a folder is that of a job."""
    return not (path / _SWEEP).is_file() and any((path / name).is_file() for name in _MARKS)


def _nothing_in(path: Path) -> str:
    return (
        f"{path} holds no job: there is no folder with {RESULT}, {OVERRIDES} or {file_name(0)}, neither it nor any "
        "below. Name the directory of a sweep (hydra.sweep.dir) or of a run (hydra.run.dir)."
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
        return JobResult(directory, "unfinished", trouble or f"killed, or still running: {error}", **known)
    interrupted = any(sign in run.error for sign in _INTERRUPTED)
    status = "unfinished" if trouble or interrupted else run.status
    ending = run.error or (None if status == "completed" else "killed half-way, or still running")
    known |= {"started": run.began, "seconds": run.seconds, "figures": figures(run)}
    return JobResult(directory, status, trouble or ending, versions=run.versions, environment=run.environment, **known)


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all; if several processes write the file at once, the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_small(path, content, flush=False)
    return path


def _figure(value: Any) -> float:
    """Return the number of a figure: NaN and infinity are texts."""
    if not (value in ("nan", "inf", "-inf") or type(value) in (int, float)):
        raise ValueError(f"a figure is {value!r:.100}")
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
"""What the fields of a result may have; reading has checked the figures."""


def _of(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) else kind()
