"""``stagereg report``: the tables, pictures and pages of a run or of a sweep, made again from what lies on disk.

For a sweep it is what the sweep ended with, for a run its figures, its checkpoints and its timeline. It can be asked at
any time: while a run goes on, after it was killed, on another machine. That jobs have failed is part of what is
reported, not a failure of the report.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagereg.output as output
from stagereg.errors import ConfigError
from stagereg.sweep.answer import sentences

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison
    from stagereg.sweep.result import JobResult

__all__ = ["add_to", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the commands of ``stagereg``."""
    help_ = "show a run or a sweep again: tables, pictures, an HTML page"
    parser = output.add_command(commands, "report", help_, run, "With --json it writes files only with --output.")
    parser.add_argument("directory", help="of a run (hydra.run.dir) or of a sweep (hydra.sweep.dir)")
    parser.add_argument("--metric", default="", help="what a sweep is ranked by; what it was run with if not given")
    parser.add_argument("--direction", choices=("minimize", "maximize"), help="which way is better, if not the usual")
    parser.add_argument("--window", default="", metavar="A:B", help="of a run's timeline, seconds since its start")
    parser.add_argument("--output", default="", metavar="DIR", help="where the files go; next to the run if not given")
    parser.add_argument("--tensorboard", default="", metavar="DIR", help="write scalars and HParams for TensorBoard")


def run(asked: argparse.Namespace) -> int:
    """Print the report and write its files. Returns 0, also where what is reported on has failed.

    Raises:
        ConfigError: the directory is neither a run nor a sweep, an option is not for what it is or has no meaning, a
            package is missing, or a file could not be written.
    """
    import stagereg.sweep.run_directory as run_directory
    import stagereg.sweep.tensorboard as tensorboard

    directory = Path(asked.directory)
    window = _window(asked.window)
    kind = run_directory.kind_of(directory)
    if asked.tensorboard:
        tensorboard.check()
    if kind == "sweep":
        if asked.window:
            raise ConfigError(f"--window is for the timeline of a run, and {directory} is a sweep: name a job of it.")
        _sweep(asked, directory)
    else:
        if asked.metric or asked.direction:
            raise ConfigError(f"--metric and --direction rank the jobs of a sweep, and {directory} is a single run.")
        _run(asked, directory, window)
    return 0


# -- a sweep


def _sweep(asked: argparse.Namespace, directory: Path) -> None:
    import stagereg.sweep.render as render
    import stagereg.sweep.render.tables as tables
    import stagereg.sweep.tensorboard as tensorboard
    from stagereg.sweep.compare import compare
    from stagereg.sweep.result import results

    jobs = results(directory)
    metric, direction = _ranking(jobs)
    if asked.metric:
        metric, direction = asked.metric, asked.direction
    comparison = compare(jobs, metric, asked.direction or direction)
    if asked.tensorboard:
        tensorboard.write_sweep(comparison, Path(asked.tensorboard))
    files, trouble = _written(asked, directory, lambda target: render.write(comparison, target))
    if asked.json:
        output.as_json({"kind": "sweep", **_plain(comparison), "files": files})
    else:
        tables.terminal(comparison)
    _say_where(files, asked, trouble)


def _ranking(jobs: Sequence[JobResult]) -> tuple[str, str | None]:
    """What the sweep was ranked by when it ran, by the config of the first job that has it, else what makes sense."""
    from omegaconf import OmegaConf

    from stagereg.sweep.metric import usual

    for job in jobs:
        with contextlib.suppress(Exception):  # whatever YAML and OmegaConf raise for a torn file
            config = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
            if metric := OmegaConf.select(config, "sweep.metric"):
                return str(metric), OmegaConf.select(config, "sweep.direction")
    return usual(set().union(*(job.figures for job in jobs))), None


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "directory": comparison.directory,
        "answer": sentences(comparison),
        "metric": comparison.ranking.name,
        "better": comparison.ranking.better,
        "repeats": comparison.repeats,
        "parameters": comparison.parameters,
        "constant": comparison.constant,
        "warnings": comparison.warnings,
        "rows": [
            {
                "parameters": row.parameters,
                "status": row.status,
                "again": row.again,
                "error": row.error,
                "note": row.note,
                "cells": {name: dataclasses.asdict(cell) for name, cell in row.cells.items()},
                "jobs": [job.directory for job in row.jobs],
            }
            for row in comparison.rows
        ],
    }


# -- a run


def _run(asked: argparse.Namespace, directory: Path, window: tuple[float, float] | None) -> None:
    import stagereg.commands.reported as reported
    import stagereg.sweep.tensorboard as tensorboard
    import stagereg.sweep.timeline as timeline
    from stagereg.sweep.figures import figures
    from stagereg.sweep.result import JobResult
    from stagereg.sweep.run import NewerError, Run

    job = JobResult.of_directory(directory)
    recorded, why = None, ""
    try:
        recorded = Run.read(directory)
    except NewerError:
        raise
    except ConfigError as error:
        why = str(error)
    if window is not None and recorded is not None:
        timeline.check_window(recorded, window)
    found = figures(recorded, job.returned) if recorded is not None else job.figures
    if asked.tensorboard:
        if recorded is None:
            raise ConfigError(f"--tensorboard: there is nothing to write. {why}")
        tensorboard.write_run(recorded, Path(asked.tensorboard))
    warnings = list(reported.warnings(job, recorded))

    def write(target: Path) -> list[Path]:
        return [] if recorded is None else reported.write(target, job, recorded, found, warnings, window)

    files, trouble = _written(asked, directory, write)
    if asked.json:
        output.as_json({"kind": "run", **reported.plain(job, recorded, found, warnings), "files": files})
    else:
        reported.show(job, recorded, found, warnings)
        if why:
            output.echo(f"\nThere is no timeline: {why}")
    _say_where(files, asked, trouble)


# -- what both need


def _window(text: str) -> tuple[float, float] | None:
    """``10:20`` as a pair of seconds; a side that is left open is the run's own."""
    if not text:
        return None
    start, colon, end = text.partition(":")
    try:
        window = (float(start or 0.0), float(end or math.inf))
    except ValueError:
        window = (math.nan, math.nan)
    if not colon or not 0 <= window[0] < window[1]:
        raise ConfigError(
            f"--window takes seconds since the start of the run, as in 10:20 or 10: or :20, not {text!r}."
        )
    return window


def _written(
    asked: argparse.Namespace, directory: Path, write: Callable[[Path], list[Path]]
) -> tuple[list[Path], ConfigError | None]:
    """Write the files, if any are wanted, and return them, or why they could not be: the tables are of use anyway."""
    if asked.json and not asked.output:
        return [], None
    target = Path(asked.output or directory)
    try:
        return write(target), None
    except OSError as error:
        why = error.strerror or error
        return [], ConfigError(f"Cannot write in {target}: {why}. `--output DIR` names another directory.")


def _say_where(files: Sequence[Path], asked: argparse.Namespace, trouble: ConfigError | None) -> None:
    if trouble is not None:
        raise trouble
    if asked.json:
        return
    if files:
        names = ", ".join(path.name for path in files)
        output.echo(f"\nWritten to {os.path.relpath(files[0].parent)}: {names}")
    if asked.tensorboard:
        output.echo(f"For TensorBoard: tensorboard --logdir {shlex.quote(asked.tensorboard)}")
