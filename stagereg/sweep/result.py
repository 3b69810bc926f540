"""What one job of a sweep leaves behind, ``result.json`` in its output directory, and how jobs are found.

The file is there completely or not at all. A job without one was killed, or no comparison ran; what can be known of it
is taken from what Hydra and the ranks have left. A directory is a run, a sweep, or neither. Reading never changes
anything.
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

from stagereg.errors import ConfigError
from stagereg.launch.command_line import Identity, by_key, split
from stagereg.output import json_numbers
from stagereg.record import file_name, plain
from stagereg.sweep.figures import figures
from stagereg.sweep.run import Run

RESULT = "result.json"
FORMAT = 1
CONFIG = Path(".hydra", "config.yaml")  # what a job was configured with, as Hydra leaves it in the job's directory
OVERRIDES = Path(".hydra", "overrides.yaml")  # as Hydra leaves them
_SWEEP = "multirun.yaml"  # file that Hydra's sweepers leave in the directory of a sweep
_MARKS = (file_name(0), RESULT, str(OVERRIDES))  # files that make a folder a job's
_INTERRUPTED = ("KeyboardInterrupt", "sys.exit(130)", "sys.exit(138)", "sys.exit(143)")
"""Errors by which a rank ends that are not its job's fault."""


@dataclass(frozen=True)
class JobResult:
    """How one job went."""

    directory: Path  # its output directory
    # `"completed"`, `"failed"`, or `"unfinished"`: killed half-way, preempted, or still running
    status: str = "completed"
    error: str | None = None  # why it failed, or `None`
    overrides: tuple[str, ...] = ()  # of the task, as they were given; without those that only distinguish repeats
    job: dict[str, Any] = field(default_factory=dict)  # Hydra's `num` (`None` outside of a sweep), `id` and `name`
    repeat: int = 0  # which run of its combination this is, from 0 on
    again: bool = False  # whether it runs the first combination once more, as if it were another one
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0  # how long it took
    returned: Any = None  # what the task returned, as JSON has it
    figures: dict[str, float] = field(default_factory=dict)  # by name, see `stagereg.sweep.figures.figures`
    versions: dict[str, str] = field(default_factory=dict)  # of stagereg, torch, hydra-core and python
    environment: dict[str, Any] = field(default_factory=dict)  # what it ran on, see `stagereg.machine.describe`
    command: str = ""  # the command line that runs this job alone; empty if unknown
    resumed: int | None = None  # the step that it resumed from; `None` if it began at the beginning

    def write(self) -> Path:
        """Write it into its directory, completely or not at all. Raises: ``OSError``."""
        path = self.directory / RESULT
        fields = {name: value for name, value in vars(self).items() if name != "directory"}
        fields["figures"] = json_numbers(self.figures)
        text = json.dumps(plain({"format": FORMAT, **fields, "returned": plain(self.returned)}), indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{RESULT}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        return temporary.replace(path)

    @classmethod
    def read(cls, directory: Path | str) -> JobResult:
        path = Path(directory, RESULT)
        try:
            content = json.loads(path.read_bytes(), parse_constant=lambda name: None)
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            known = content["figures"].items()  # NaN and infinity are texts; null is what NaN was once
            content["figures"] = {name: math.nan if value is None else float(value) for name, value in known}
            content["overrides"] = tuple(content["overrides"])
            return cls(path.parent, **content)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged, or of another version of stagereg: {error}.") from error

    @classmethod
    def of_directory(cls, directory: Path | str) -> JobResult:
        """What is known of the job that ran in ``directory``, also where it left no result.

        Without a result its ranks' records decide: completed or failed if all of them have recorded such an end, else
        unfinished. It is unfinished, too, where its result cannot be read; its error then has the reason.
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
        num = self.job.get("num")
        parts = re.split(r"(\d+)", str(self.directory))
        return (num if isinstance(num, int) else math.inf, [int(p) if p.isdecimal() else p for p in parts])


def results(sweep_dir: Path | str) -> list[JobResult]:
    """Every job in or below a directory, in the order they were planned; other sweeps below it are passed over.

    A job is a folder with ``result.json``, ``.hydra/overrides.yaml`` or ``metrics.jsonl``.
    """
    if not (jobs := jobs_in(root := Path(sweep_dir))):
        raise ConfigError(_nothing_in(root))
    return jobs


def jobs_in(root: Path) -> list[JobResult]:
    """As :func:`results`, but an empty list if there are none."""
    found = _folders(root, lambda path: is_job(path) or (path != root and (path / _SWEEP).is_file()))
    jobs = [JobResult.of_directory(path) for path in found if is_job(path)]
    return sorted(jobs, key=lambda job: job.order)


def kind_of(directory: Path) -> Literal["run", "sweep"]:
    """Return which of the two ``directory`` is; the error has what was looked for."""
    if is_job(directory):
        return "run"
    if _is_sweep(directory):
        return "sweep"
    if not directory.exists():
        raise ConfigError(f"There is no directory {directory}.")
    raise ConfigError(_nothing_in(directory))


def _folders(root: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    found: list[Path] = []
    for folder, below, _ in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        if wanted(Path(folder)):
            found.append(Path(folder))
            below.clear()
    return found


def is_completed(directory: Path | str) -> bool:
    """Whether a directory has the result of a completed job."""
    with contextlib.suppress(ConfigError):
        return JobResult.read(directory).status == "completed"
    return False


def is_job(path: Path) -> bool:
    """Whether a folder is that of a job."""
    return not (path / _SWEEP).is_file() and any((path / name).is_file() for name in _MARKS)


def _is_sweep(path: Path) -> bool:
    """Whether the jobs of one sweep lie below: by Hydra's file, or they are numbered as a sweep's are."""
    numbered = (one for one in path.glob("[0-9]*") if one.name.isdecimal())
    return (path / _SWEEP).is_file() or any(map(is_job, numbered))


def _nothing_in(path: Path) -> str:
    return (
        f"{path} holds no job: there is no folder with {RESULT}, {OVERRIDES} or {file_name(0)}, neither it nor any "
        "below. Name the directory of a sweep (hydra.sweep.dir) or of a run (hydra.run.dir)."
    )


def _without_result(directory: Path, trouble: str) -> JobResult:
    overrides, repeat, again = split([str(each) for each in _of(list, yaml_of(directory / OVERRIDES))])
    hydra = _of(dict, _of(dict, yaml_of(directory / ".hydra" / "hydra.yaml")).get("hydra"))
    job = {name: value for name, value in _of(dict, hydra.get("job")).items() if name in ("num", "id", "name")}
    known: dict[str, Any] = {"overrides": overrides, "job": job, "repeat": repeat, "again": again}
    try:
        run = Run.read(directory)
    except ConfigError as error:
        return JobResult(directory, "unfinished", trouble or f"killed, or still running: {error}", **known)
    interrupted = any(sign in run.error for sign in _INTERRUPTED)
    status = "unfinished" if trouble or interrupted else run.status
    ending = run.error or (None if status == "completed" else "killed half-way, or still running")
    known |= {"started": run.began, "seconds": run.seconds, "figures": figures(run)}
    known |= {"versions": run.versions, "environment": run.environment}
    return JobResult(directory, status, trouble or ending, **known)


def yaml_of(path: Path) -> Any:
    """The content of a file of Hydra's, with nothing interpolated; ``None`` if it cannot be read."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception:  # whatever YAML and OmegaConf raise for a torn file
        return None


def _of(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) else kind()
