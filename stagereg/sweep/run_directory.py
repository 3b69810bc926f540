"""What a directory is: a run, a sweep, or neither, and then what there is instead.

People give the directory next to the one they mean: the parent of all runs, the checkpoints in it, a file of it. All of
these get an answer that names the directory to give. Reads names and Hydra's files only; nothing of the runs' records.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from stagereg.errors import ConfigError, nearest
from stagereg.record import file_name

__all__ = ["is_run", "is_sweep", "kind_of"]

_DEPTH = 4
"""How many folders below a directory runs are looked for: ``multirun/DATE/TIME/JOB``."""
_MOST_FOLDERS = 5000
_NAMED = 5
"""How many runs or other things are named in a message."""
_STEP = re.compile(r"\.?step-\d+")
_MULTIRUN = re.compile(r"^  mode: MULTIRUN$", re.MULTILINE)
_SUBDIR = re.compile(r"^    subdir: ['\"]?(.+?)['\"]?$", re.MULTILINE)
"""Of ``hydra.yaml``, which can be large and of which many may have to be read: no parser."""
_MARKS = (file_name(0), "result.json", os.path.join(".hydra", "overrides.yaml"))
_LOOKED_FOR = f"a run has {_MARKS[0]}, {_MARKS[1]} or {_MARKS[2]} in it, a sweep has runs in it, one a job"


def kind_of(directory: Path) -> Literal["run", "sweep"]:
    """Return which of the two ``directory`` is.

    Raises:
        ConfigError: it is neither; the message has what was looked for, what there is, and what was probably meant.
    """
    if is_run(directory):
        return "run"
    if is_sweep(directory):
        return "sweep"
    raise ConfigError(_neither(directory))


def is_run(directory: Path) -> bool:
    """Whether one run has left its record there, or one job of a sweep."""
    if (directory / "multirun.yaml").is_file():
        return False
    return any((directory / mark).is_file() for mark in _MARKS)


def is_sweep(directory: Path) -> bool:
    """Whether the jobs of one sweep lie below: by Hydra's file, or they are numbered as a sweep's are."""
    if (directory / "multirun.yaml").is_file():
        return True
    below = [child for child in _folders(directory) if child.name.isdecimal()]
    if any(is_run(child) for child in below):
        return True
    return any(_sweep_of(run) == directory for run in _below(directory, _DEPTH - 1) if is_run(run))


def _neither(directory: Path) -> str:
    """The error message for a directory that is no run and no sweep."""
    if not directory.exists():
        return _absent(directory)
    given = next((parent for parent in directory.absolute().parents if is_run(parent) or _is_sweep_near(parent)), None)
    if directory.is_file():
        what = f"{directory} is a file"
    elif directory.name == ".hydra":
        what = f"{directory} has the configs of a run"
    elif _has_checkpoints(directory):
        what = f"{directory} has checkpoints, but no record of the run that wrote them"
    else:
        what = ""
    if what and given is not None:
        return f"{what}. Name the {'run' if is_run(given) else 'sweep'}:\n  {_command(given)}"
    if directory.is_file():
        return f"{what}; name the directory of a run or of a sweep."
    found = sorted(_directories(directory), key=_age, reverse=True)
    if found:
        more = f" of {len(found)}" if len(found) > _NAMED else ""
        lines = [f"  {_command(one)}  # a {'run' if is_run(one) else 'sweep'}" for one in found[:_NAMED]]
        return "\n".join([f"{directory} is no run and no sweep, but has some below. The newest{more}:", *lines])
    there = sorted(child.name + "/" * child.is_dir() for child in directory.iterdir())
    rest = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
    has = f"there is: {', '.join(there[:_NAMED])}{rest}" if there else "it is empty"
    start = f"{what}. It is" if what else f"{directory} is"
    return f"{start} no run and no sweep, and has none below: {_LOOKED_FOR}; {has}."


def _absent(directory: Path) -> str:
    above = directory.absolute().parent
    while not above.is_dir():
        above = above.parent
    names = sorted(child.name for child in _folders(above))
    close = nearest(directory.absolute().relative_to(above).parts[0], names)
    has = f" {above} has: {', '.join(names[:_NAMED])}{', …' * (len(names) > _NAMED)}." if names else ""
    return f"There is no directory {directory}.{close}{has}"


def _is_sweep_near(directory: Path) -> bool:
    return (directory / "multirun.yaml").is_file()


def _has_checkpoints(directory: Path) -> bool:
    if _STEP.fullmatch(directory.name) or directory.name == "latest":
        return True
    return any(_STEP.match(child.name) for child in _folders(directory))


def _directories(directory: Path) -> Iterator[Path]:
    """The runs and sweeps below, without the jobs of sweeps."""
    inside: set[Path] = set()
    for path in _below(directory, _DEPTH):
        if path.parent in inside:
            inside.add(path)
        elif is_run(path) or is_sweep(path):
            inside.add(path)
            yield path


def _below(directory: Path, depth: int) -> Iterator[Path]:
    """The folders below, those above first, and in a directory of them all by name; no links, nothing hidden."""
    level, seen = [directory], 0
    for _ in range(depth):
        level = [child for parent in level for child in _folders(parent) if not _STEP.fullmatch(child.name)]
        yield from level
        seen += len(level)
        if seen > _MOST_FOLDERS:
            return


def _folders(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as there:
            names = [one.name for one in there if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")]
    except OSError:
        return []
    return [directory / name for name in sorted(names)]


def _sweep_of(job: Path) -> Path | None:
    """The directory of the sweep that a job belongs to, by what Hydra wrote when it ran, wherever that lies now."""
    try:
        text = (job / ".hydra" / "hydra.yaml").read_text()
    except OSError:
        return None
    subdir = _SUBDIR.search(text)
    if subdir is None or not _MULTIRUN.search(text):
        return None
    above = re.sub(r"\$\{.*?\}", "_", subdir[1]).strip("/").count("/")
    return job.parents[above] if above < len(job.parents) else None


def _age(directory: Path) -> float:
    """When something was last written into it or into a folder in it."""
    return max(path.stat().st_mtime for path in (directory, *_folders(directory)))


def _command(directory: Path) -> str:
    shown = os.path.relpath(directory)
    return f"stagereg report {shlex.quote(str(directory) if shown.startswith('..') else shown)}"
