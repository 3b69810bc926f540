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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagereg.output as output
from stagereg.errors import ConfigError
from stagereg.sweep.answer import answer

if TYPE_CHECKING:
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
    import stagereg.sweep.tensorboard as tensorboard
    from stagereg.commands.reported import RunReport
    from stagereg.sweep.result import kind_of

    directory, window = Path(asked.directory), _window(asked.window)
    is_sweep = kind_of(directory) == "sweep"
    if is_sweep and window is not None:
        raise ConfigError(f"--window is for the timeline of a run, and {directory} is a sweep: name a job of it.")
    if not is_sweep and (asked.metric or asked.direction):
        raise ConfigError(f"--metric and --direction rank the jobs of a sweep, and {directory} is a single run.")
    if asked.tensorboard:
        tensorboard.check()
    report = SweepReport(directory, asked.metric, asked.direction) if is_sweep else RunReport(directory, window)
    if asked.tensorboard:
        report.write_scalars(Path(asked.tensorboard))
    target, files, trouble = Path(asked.output or directory), [], None
    try:
        files = report.write(target) if asked.output or not asked.json else []
    except OSError as error:  # the tables are of use anyway
        why = error.strerror or error
        trouble = ConfigError(f"Cannot write in {target}: {why}. `--output DIR` names another directory.")
    if asked.json:
        output.as_json({**report.plain(), "files": files})
    else:
        report.show()
    if trouble is not None:
        raise trouble
    if files and not asked.json:
        names = ", ".join(path.name for path in files)
        output.echo(f"\nWritten to {os.path.relpath(files[0].parent)}: {names}")
    if asked.tensorboard and not asked.json:
        output.echo(f"For TensorBoard: tensorboard --logdir {shlex.quote(asked.tensorboard)}")
    return 0


class SweepReport:
    """The report on a sweep: its comparison, ranked by what it was run with or by what is asked for."""

    def __init__(self, directory: Path, metric: str, direction: str | None) -> None:
        from stagereg.sweep.comparison import compare
        from stagereg.sweep.result import results

        jobs = results(directory)
        own, its_direction = _ranking(jobs)
        self._comparison = compare(jobs, metric or own, direction or (None if metric else its_direction))

    def write_scalars(self, logdir: Path) -> None:
        """Write what TensorBoard shows."""
        import stagereg.sweep.tensorboard as tensorboard

        tensorboard.write_sweep(self._comparison, logdir)

    def write(self, target: Path) -> list[Path]:
        """Write its files and return their paths. Raises: ``OSError``."""
        import stagereg.sweep.render as render

        return render.write(self._comparison, target)

    def show(self) -> None:
        """Print it."""
        import stagereg.sweep.render.tables as tables

        tables.terminal(self._comparison)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        comparison, rows = self._comparison, []
        for row in comparison.rows:
            cells = {name: dataclasses.asdict(cell) for name, cell in row.cells.items()}
            shown = {"parameters": row.parameters, "status": row.status, "again": row.again, "error": row.error}
            rows.append({**shown, "note": row.note, "cells": cells, "jobs": [job.directory for job in row.jobs]})
        return {
            "kind": "sweep",
            "directory": comparison.directory,
            "answer": answer(comparison).text,
            "metric": comparison.ranking.name,
            "better": comparison.ranking.better,
            "repeats": comparison.repeats,
            "parameters": comparison.parameters,
            "constant": comparison.constant,
            "warnings": comparison.warnings,
            "rows": rows,
        }


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
