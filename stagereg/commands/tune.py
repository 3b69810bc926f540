"""``stagereg tune``: search for the stager, the options and the interval with which a program loses least.

This module has the command line and how it ends, ``tune_session`` the output, :mod:`stagereg.sweep.tuning` the search.
All that was asked for is checked before anything is run. What has been tried is kept, so the same command goes on where
it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import stagereg.output as output
from stagereg.errors import ConfigError

__all__ = ["add_to", "run"]

_FLAGS = ("--config-path", "--config-name", "--config-dir")
"""Hydra's own options that a program may need."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune`` to the commands of ``stagereg``."""
    help_ = "search for the stager, its options and the checkpoint interval that hold training up least"
    parser = commands.add_parser(
        "tune",
        help=help_,
        description=help_[0].upper() + help_[1:] + ". Each trial is a run of its own: give the program a short one "
        "(train.steps=200). The same command again goes on where it was stopped.",
    )
    parser.add_argument("script", help="the program, as after `python`: train.py")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run; what they set is not varied")
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="vary this too, or over these values: KEY=a,b  KEY=choice(..)  KEY=range(..)  KEY=interval(..); may be "
        "given again",
    )
    parser.add_argument("--only", action="store_true", help="vary nothing but what --over names")
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="trials in all, %(default)s")
    parser.add_argument("--metric", metavar="NAME", help="what to search by, stall_ms")
    parser.add_argument("--direction", choices=["minimize", "maximize"], help="of the metric, by default its own")
    parser.add_argument(
        "--mtbf",
        metavar="TIME",
        help="search by the time lost in expectation where the job fails this often (6h), interval and all",
    )
    parser.add_argument("--confirm", type=int, default=3, metavar="N", help="runs of best and defaults, %(default)s")
    parser.add_argument(
        "--trial-timeout", type=float, default=600.0, metavar="S", help="seconds that a run may take, %(default)g"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search, %(default)s")
    parser.add_argument("--output", metavar="DIR", help="where all is kept, outputs/tune-SCRIPT")
    parser.add_argument("--database", metavar="FILE", help="of the search, DIR/study.db; or a URL that Optuna takes")
    for flag in _FLAGS:
        parser.add_argument(flag, metavar="X", help=f"Hydra's {flag}, for the program")
    output.add_output_options(parser)
    parser.set_defaults(run=run)
    _take_overrides_anywhere(parser)


def run(asked: argparse.Namespace) -> int:
    """Search, and print the answer. Returns 0, or 1 if nothing could be measured; 130 after SIGINT, 143 after SIGTERM.

    Raises:
        ConfigError: something that was asked for cannot be had; nothing was run.
    """
    _check(asked)
    from stagereg.commands.tune_session import Session
    from stagereg.sweep.program import Program
    from stagereg.sweep.study import require

    require()
    flags = tuple(part for flag in _FLAGS if (value := getattr(asked, _name(flag))) for part in (flag, value))
    program = Program(asked.script, flags, tuple(asked.overrides))
    directory = Path(asked.output or f"outputs/tune-{program.name}")
    with _alone(directory), _terminable():
        try:
            return Session(asked, program, directory).run()
        except KeyboardInterrupt:
            output.progress()
            print(f"Stopped. The same command goes on from {directory}.", file=sys.stderr)
            return 130


# -- what was asked for


def _take_overrides_anywhere(parser: argparse.ArgumentParser) -> None:
    """Accept overrides between options: argparse takes them only before or after all options."""
    parse = parser.parse_known_args

    def parse_known_args(*arguments: Any) -> Any:
        asked, left = parse(*arguments)
        asked.overrides += [argument for argument in left if not argument.startswith("-")]
        return asked, [argument for argument in left if argument.startswith("-")]

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _check(asked: argparse.Namespace) -> None:
    if asked.trials < 1:
        raise ConfigError(f"--trials must be at least 1, not {asked.trials}.")
    if asked.confirm < 0:
        raise ConfigError(f"--confirm takes a number of runs, 0 for none, not {asked.confirm}.")
    if not asked.trial_timeout > 0:
        raise ConfigError(f"--trial-timeout takes seconds, more than 0, not {asked.trial_timeout:g}.")
    if bad := next((each for each in asked.overrides if "=" not in each and not each.startswith("~")), None):
        raise ConfigError(f"{bad} is no override: write key=value.")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


# -- how it ends


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep a second search out of the directory for the time of a ``with`` block."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another search is at work in {directory}: wait for it, or name another --output."
            ) from None
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run that is under way before they end this process."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
