"""``stagereg report``: the tables, pictures and pages of a run or of a sweep, made again from what lies on disk.

For a sweep it is what the sweep ended with, for a run its figures, its checkpoints and its timeline. It can be asked at
any time: while a run goes on, after it was killed, on another machine. That jobs have failed is part of what is
reported, not a failure of the report.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import stagereg.output as output
from stagereg.errors import ConfigError
from stagereg.sweep.result import kind_of

__all__ = ["add_to", "run"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the commands of ``stagereg``."""
    help_ = "show a run or a sweep again: tables, pictures, an HTML page"
    parser = output.add_command(commands, "report", help_, run, "With --json it writes files only with --output.")
    parser.add_argument("directory", help="of a run (hydra.run.dir) or of a sweep (hydra.sweep.dir)")
    parser.add_argument("--metric", default="", help="what a sweep is ranked by; what it was run with if not given")
    parser.add_argument("--direction", choices=("minimize", "maximize"), help="which way is better, if not the usual")
    parser.add_argument("--output", default="", metavar="DIR", help="where the files go; next to the run if not given")


def run(asked: argparse.Namespace) -> int:
    """Print the report and write its files. Returns 0, also where what is reported on has failed.

    Raises:
        ConfigError: the directory is neither a run nor a sweep, an option is not for what it is, or a file could not
            be written.
    """
    from stagereg.commands.reported import RunReport, SweepReport

    directory = Path(asked.directory)
    is_sweep = kind_of(directory) == "sweep"
    if not is_sweep and (asked.metric or asked.direction):
        raise ConfigError(f"--metric and --direction rank the jobs of a sweep, and {directory} is a single run.")
    report = SweepReport(directory, asked.metric, asked.direction) if is_sweep else RunReport(directory)
    if not asked.json:
        report.show()
    target = Path(asked.output or directory)
    try:
        files = report.write(target) if asked.output or not asked.json else []
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"Cannot write in {target}: {why}. `--output DIR` names another directory.") from error
    if asked.json:
        output.as_json({**report.plain(), "files": files})
    elif files:
        output.echo(f"\nWritten to {os.path.relpath(target)}: {', '.join(path.name for path in files)}")
    return 0
