"""What one job of a sweep leaves behind: ``result.json`` in its output directory, and how all of a sweep are found.

The file is there completely or not at all. A job without one was killed, or no comparison ran; what can be
known of it is taken from what Hydra and the ranks have left. Reading never changes anything.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.record import file_name
from stagereg.sweep.figures import figures, number
from stagereg.sweep.run import NewerError, Run

__all__ = ["FORMAT", "OVERRIDES", "RESULT", "SWEEP", "JobResult", "results", "split"]

RESULT = "result.json"
FORMAT = 1
OVERRIDES = Path(".hydra", "overrides.yaml")
SWEEP = "multirun.yaml"
"""What Hydra's sweepers leave in the directory of a sweep."""
_STATUSES = ("completed", "failed", "unfinished")
_INTERRUPTED = ("KeyboardInterrupt", "sys.exit(130)", "sys.exit(138)", "sys.exit(143)")
"""Errors by which a rank ends that are not its job's fault."""
_DEEPEST = 20
"""Levels of what a task returns that are kept as they are."""
_MARK = re.compile(r"\+{0,2}sweep\.(repeat|again)=(.*)")


@dataclass(frozen=True)
class JobResult:
    """How one job went.

    Attributes:
        directory: its output directory.
        status: ``"completed"``, ``"failed"``, or ``"unfinished"``: killed half-way, preempted, or still running.
        error: why it failed, or ``None``.
        overrides: of the task, as they were given; without those that only distinguish repeats.
        job: Hydra's ``num`` (``None`` outside of a sweep), ``id`` and ``name``, and the class of its ``sweeper``.
        repeat: which run of its combination this is, from 0 on.
        again: whether it runs the first combination once more, as if it were another one.
        started: seconds since the epoch.
        seconds: how long it took.
        returned: what the task returned, as JSON has it.
        figures: by name, see :func:`stagereg.sweep.figures.figures`; all finite.
        versions: of stagereg, torch, hydra-core and python.
        environment: what it ran on, see :func:`stagereg.machine.describe`.
        command: the command line that runs this job alone; empty if unknown.
    """

    directory: Path
    status: str = "completed"
    error: str | None = None
    overrides: tuple[str, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    repeat: int = 0
    again: bool = False
    started: float = 0.0
    seconds: float = 0.0
    returned: Any = None
    figures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    def write(self) -> Path:
        """Write it into its directory, completely or not at all. Raises: ``OSError``."""
        path = self.directory / RESULT
        fields = {name: value for name, value in vars(self).items() if name != "directory"}
        text = json.dumps(_plain({"format": FORMAT, **fields}), indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def read(cls, directory: Path | str) -> JobResult:
        """Read the ``result.json`` in a directory.

        Raises:
            ConfigError: it is not there, not of the project, damaged, or of a newer version.
        """
        path = Path(directory, RESULT)
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {error}.") from error
        return cls(path.parent, **_fields(content, path))

    @classmethod
    def of_directory(cls, directory: Path | str) -> JobResult:
        """What is known of the job that ran in ``directory``, also where it left no result.

        Without a result its ranks' records decide: completed or failed if all of them have recorded such an end, else
        unfinished. It is unfinished, too, where its result cannot be read; its error then has the reason.

        Raises:
            ConfigError: a newer version of the project wrote there, or no job did.
        """
        directory = Path(directory)
        trouble = ""
        if (directory / RESULT).exists():
            try:
                return cls.read(directory)
            except NewerError:
                raise
            except ConfigError as error:
                trouble = str(error)
        elif not _is_job(directory):
            raise ConfigError(_nothing_in(directory))
        return _without_result(directory, trouble)

    def has(self, name: str) -> bool:
        """Whether a figure is known, and finite."""
        return math.isfinite(self.figures.get(name, math.nan))

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts jobs as they were planned: by number, then by directory, ``9`` before ``10``."""
        num = self.job.get("num")
        parts = re.split(r"(\d+)", str(self.directory))
        return (num if isinstance(num, int) else math.inf, [int(p) if p.isdecimal() else p for p in parts])


def results(sweep_dir: Path | str) -> list[JobResult]:
    """Every job in or below a directory, in the order they were planned.

    A job is a folder with ``result.json``, ``.hydra/overrides.yaml`` or ``metrics.jsonl``.

    Raises:
        ConfigError: the directory holds no job or several sweeps, or a newer version of the project wrote there.
    """
    sweep_dir = Path(sweep_dir)
    sweeps: list[Path] = []
    jobs = list(_jobs(sweep_dir, sweeps))
    if len(sweeps) > 1:
        newest = max(sweeps, key=lambda path: (path / SWEEP).stat().st_mtime)
        raise ConfigError(f"{sweep_dir} holds {len(sweeps)} sweeps: name one of them. The newest is {newest}.")
    if not jobs:
        raise ConfigError(_nothing_in(sweep_dir))
    return sorted(map(JobResult.of_directory, jobs), key=lambda job: job.order)


def split(overrides: Iterable[str]) -> tuple[tuple[str, ...], int, bool]:
    """Part overrides into those of the combination, and which repeat of it this is and whether it is the A/A job."""
    kept: list[str] = []
    marks = {"repeat": "0", "again": "false"}
    for override in overrides:
        mark = _MARK.fullmatch(override)
        if mark is None:
            kept.append(override)
        else:
            marks[mark[1]] = mark[2]
    repeat = int(marks["repeat"]) if marks["repeat"].isdecimal() else 0
    return tuple(kept), repeat, marks["again"].lower() == "true"


def _jobs(root: Path, sweeps: list[Path]) -> Iterator[Path]:
    """Folders of jobs; what lies below one is the job's own. Fills ``sweeps`` with the folders Hydra calls that."""
    for folder, below, names in os.walk(root):
        path = Path(folder)
        if SWEEP in names:
            sweeps.append(path)
        if _is_job(path):
            below.clear()
            yield path
        below[:] = [name for name in below if not name.startswith(".")]


def _is_job(path: Path) -> bool:
    return any((path / name).is_file() for name in (RESULT, OVERRIDES, file_name(0)))


def _nothing_in(path: Path) -> str:
    return (
        f"{path} holds no job: there is no folder with {RESULT}, {OVERRIDES} or {file_name(0)}, neither it nor any "
        "below. Name the directory of a sweep (hydra.sweep.dir) or of a run (hydra.run.dir)."
    )


def _without_result(directory: Path, trouble: str) -> JobResult:
    """What Hydra and the ranks have left of a job."""
    overrides, repeat, again = split(map(str, _yaml(directory / OVERRIDES, list)))
    hydra = _of(dict, _yaml(directory / ".hydra" / "hydra.yaml", dict), "hydra")
    job = {name: value for name, value in _of(dict, hydra, "job").items() if name in ("num", "id", "name")}
    if target := _of(dict, hydra, "sweeper").get("_target_"):
        job["sweeper"] = str(target).rpartition(".")[2]
    known: dict[str, Any] = {"overrides": overrides, "job": job, "repeat": repeat, "again": again}
    try:
        run = Run.read(directory)
    except NewerError:
        raise
    except ConfigError:
        return JobResult(directory, "unfinished", trouble or "killed, or still running: nothing recorded yet", **known)
    interrupted = any(sign in run.error for sign in _INTERRUPTED)
    status = "unfinished" if trouble or interrupted else run.status
    ending = run.error or (None if status == "completed" else "killed half-way, or still running")
    return JobResult(
        directory,
        status,
        trouble or ending,
        **known,
        started=run.began,
        seconds=run.seconds,
        figures=figures(run),
        versions=run.versions,
        environment=run.environment,
    )


def _yaml(path: Path, kind: type[Any]) -> Any:
    """The content of a file of Hydra's, with nothing interpolated; an empty ``kind`` if it cannot be read as one."""
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception:  # whatever YAML and OmegaConf raise for a torn file
        return kind()
    return content if isinstance(content, kind) else kind()


def _fields(content: Any, path: Path) -> dict[str, Any]:
    """The fields of a result, each of its type. Raises: ``ConfigError`` for what is no result."""
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ConfigError(f"{path} is no result of a job: stagereg has not written it.")
    if content["format"] > FORMAT:
        raise NewerError(
            f"{path} was written by a newer stagereg (format {content['format']}; this one reads formats up to "
            f"{FORMAT}). Update stagereg to read it."
        )
    if content.get("status") not in _STATUSES:
        raise ConfigError(f"{path} is no result of a job: its status is {content.get('status')!r}.")
    numbers = {str(name): number(value) for name, value in _of(dict, content, "figures").items()}
    return {
        "status": content["status"],
        "error": None if content.get("error") is None else str(content["error"]),
        "overrides": tuple(map(str, _of(list, content, "overrides"))),
        "job": _of(dict, content, "job"),
        "repeat": int(number(content.get("repeat")) or 0),
        "again": content.get("again") is True,
        "started": number(content.get("started")) or 0.0,
        "seconds": number(content.get("seconds")) or 0.0,
        "returned": content.get("returned"),
        "figures": {name: value for name, value in numbers.items() if value is not None},
        "versions": {str(name): str(value) for name, value in _of(dict, content, "versions").items()},
        "environment": _of(dict, content, "environment"),
        "command": str(content.get("command") or ""),
    }


def _of(kind: type[Any], content: Mapping[str, Any], name: str) -> Any:
    value = content.get(name)
    return value if isinstance(value, kind) else kind()


def _plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON can have it: NaN and infinity as null, what JSON has no type for as a number or as text."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): _plain(each, depth + 1) for key, each in value.items()}
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [_plain(each, depth + 1) for each in value]
    found = number(value)
    return str(value) if found is None else found
