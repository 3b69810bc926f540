"""Helpers for the argument parsers of subcommands."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_: str,
    run: Callable[[argparse.Namespace], int],
    more: str = "",
) -> argparse.ArgumentParser:
    """Add a subcommand with the option ``--json``, and return its parser. ``more``: the end of its description."""
    parser = commands.add_parser(name, help=help_, description=f"{help_[0].upper()}{help_[1:]}. {more}".strip())
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def above_zero(read: Callable[[str], Any], or_zero: bool = False) -> Callable[[str], Any]:
    """Return an argparse ``type`` for a number above 0, or at least 0 with ``or_zero``. ``read`` parses the number."""

    def checked(text: str) -> Any:
        try:
            number = read(text)
        except ValueError as error:  # ConfigError is a subclass
            raise argparse.ArgumentTypeError(str(error)) from error
        if not 0 < number < math.inf and not (or_zero and number == 0):
            raise argparse.ArgumentTypeError(f"must be {'at least' if or_zero else 'above'} 0, got {text!r}")
        return number

    return checked


def add_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--timeout`` to a command. ``what`` is the operation with this limit, for the help text."""
    help_ = f"limit in seconds for {what}; default %(default)g"
    parser.add_argument("--timeout", type=above_zero(float), default=60.0, metavar="S", help=help_)
