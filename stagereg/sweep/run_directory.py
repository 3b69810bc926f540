"""What a directory is: a run, a sweep, or neither, and then which one was probably meant.

People give the directory next to the one they mean: the parent of all runs, the checkpoints in it, a file of it. The
error names the directory to give. Reads names only; nothing of the runs' records.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from stagereg.errors import ConfigError, nearest
from stagereg.record import file_name
from stagereg.sweep.result import OVERRIDES, RESULT, SWEEP

__all__ = ["is_run", "is_sweep", "kind_of"]

_DEPTH = 4
"""How many folders below a directory runs are looked for: ``multirun/DATE/TIME/JOB``."""
_MOST_FOLDERS = 5000
_NAMED = 5
"""How many runs or other things are named in a message."""
_MARKS = (file_name(0), RESULT, str(OVERRIDES))


def kind_of(directory: Path) -> Literal["run", "sweep"]:
    """Return which of the two ``directory`` is.

    Raises:
        ConfigError: it is neither; the message has what was looked for, or what was probably meant.
    """
    if is_run(directory):
        return "run"
    if is_sweep(directory):
        return "sweep"
    if not directory.exists():
        above = next(parent for parent in directory.absolute().parents if parent.is_dir())
        missing = directory.absolute().relative_to(above).parts[0]
        raise ConfigError(f"There is no directory {directory}.{nearest(missing, sorted(os.listdir(above)))}")
    within = next((one for one in directory.absolute().parents if is_run(one) or is_sweep(one)), None)
    if within is not None:
        raise ConfigError(f"{directory} is a part of a run or a sweep. Name that:\n{_command(within)}")
    below = sorted(_runs_and_sweeps(directory), key=lambda one: one.stat().st_mtime, reverse=True)
    if below:
        newest = "\n".join(map(_command, below[:_NAMED]))
        raise ConfigError(f"{directory} is no run and no sweep, but has {len(below)} below. The newest:\n{newest}")
    raise ConfigError(
        f"{directory} is no run and no sweep and has none below: a run has {', '.join(_MARKS[:-1])} or {_MARKS[-1]} in "
        "it, a sweep has numbered runs in it."
    )


def is_run(directory: Path) -> bool:
    """Whether one run has left its record there, or one job of a sweep."""
    return not (directory / SWEEP).is_file() and any((directory / mark).is_file() for mark in _MARKS)


def is_sweep(directory: Path) -> bool:
    """Whether the jobs of one sweep lie below: by Hydra's file, or they are numbered as a sweep's are."""
    return (directory / SWEEP).is_file() or any(is_run(one) for one in _folders(directory) if one.name.isdecimal())


def _runs_and_sweeps(directory: Path) -> Iterator[Path]:
    """The runs and sweeps below, without the jobs of sweeps; those nearest first."""
    level, seen = [directory], 0
    for _ in range(_DEPTH):
        below = [child for parent in level for child in _folders(parent)]
        found = [child for child in below if is_run(child) or is_sweep(child)]
        yield from found
        level = [child for child in below if child not in found]
        seen += len(below)
        if seen > _MOST_FOLDERS:
            return


def _folders(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as there:
            names = [one.name for one in there if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")]
    except OSError:
        return []
    return [directory / name for name in sorted(names)]


def _command(directory: Path) -> str:
    shown = os.path.relpath(directory)
    kind = "sweep" if is_sweep(directory) else "run"
    return f"  stagereg report {shlex.quote(str(directory) if shown.startswith('..') else shown)}  # a {kind}"
