"""The command ``stagereg``, which imports only the module of the requested subcommand.

The module of a subcommand has a function ``add_to(commands)``, which adds a parser. The parser's default ``run`` is a
function of the parsed arguments that returns the exit code, and imports its dependencies when it is called. If the
parser has the default ``as_a_rank``, the command runs in the environment that ``stagereg.main`` gives to ranks. Errors
of the project are printed without a traceback. Other packages add a subcommand with an entry point in the group
``stagereg.commands``: its name is the command, its value is the module.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import stagereg.base.output as output
from stagereg.base.installed import announced
from stagereg.base.machine import become_a_rank
from stagereg.base.providers import missing
from stagereg.base.version import __version__
from stagereg.errors import InstallationError, StageregError, nearest, reason

ENTRY_POINTS = "stagereg.commands"
BUILT_IN = {
    "list": "stagereg.commands.listing",
    "show": "stagereg.commands.listing",
    "run": "stagereg.commands.running",
    "new": "stagereg.commands.scaffold",
    "check": "stagereg.commands.checking",
    "doctor": "stagereg.commands.doctor",
    "bench": "stagereg.bench.command",
    "report": "stagereg.commands.reporting",
    "ls": "stagereg.commands.inventory",
    "verify": "stagereg.commands.inventory",
    "prove": "stagereg.commands.proving",
    "follow": "stagereg.commands.following",
    "convert": "stagereg.commands.converting",
}
"""The module of each built-in subcommand, in the order of ``--help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default the arguments of the process, and return its exit code.

    0: success; 1: defined by the subcommand; 2: invalid request; 130: interrupted; 141: the output pipe was closed.
    """
    parser = argparse.ArgumentParser("stagereg", description="Checkpoints, joins and a launcher for PyTorch training.")
    parser.add_argument("--version", action="version", version=f"stagereg {__version__}")
    parser.set_defaults(as_a_rank=False)
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        asked = _parsed(parser, given)
        if asked is None:
            return 2
        if arguments is None and asked.as_a_rank:
            become_a_rank("-m", "stagereg", *sys.argv[1:])
        code: int = asked.run(asked)
        sys.stdout.flush()
    except StageregError as error:
        output.warn(f"stagereg: {error}")
        return 2
    except ModuleNotFoundError as error:
        if not (why := missing(str(error.name))):
            raise
        output.warn(f"stagereg: `stagereg {given[0]}` cannot run with these options. {why}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the pipe exited, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _parsed(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace | None:
    """Return the parsed arguments. Without arguments, print the help and return ``None``. Raises: ``StageregError``."""
    commands = parser.add_subparsers(required=True, metavar="command")
    name = given[0] if given and not given[0].startswith("-") else ""
    others = {} if name in BUILT_IN else _of_other_packages()
    known = {**others, **BUILT_IN}
    if name in known:
        _add(commands, name, known[name])
        return parser.parse_args(given)
    if name:
        every = ", ".join([*BUILT_IN, *sorted(others)])
        parser.error(f"unknown command {name!r}.{nearest(name, known)} The commands are: {every}")
    for module in dict.fromkeys([*BUILT_IN.values(), *others.values()]):
        added = [each for each in known if known[each] == module]
        try:
            _add(commands, added[0], module)
        except StageregError as error:  # the error is raised again when the user runs the command
            for each in set(added).difference(commands.choices):
                commands.add_parser(each, help=f"not available: {error}")
    if not given:
        parser.print_help(sys.stderr)
        return None
    return parser.parse_args(given)


def _of_other_packages() -> dict[str, str]:
    """Return the modules of other packages' subcommands, by name. If two have the same name, the first one wins."""
    points, _ = announced(ENTRY_POINTS)
    return {point.name: point.module for _, _, point in reversed(points) if point.name not in BUILT_IN}


def _add(commands: Any, name: str, module: str) -> None:
    """Add the parser of a subcommand. Raises: ``InstallationError`` if its module cannot be imported."""
    try:
        importlib.import_module(module).add_to(commands)
    except (Exception, SystemExit) as error:
        cure = "Reinstall stagereg" if module.startswith("stagereg.") else "Reinstall its package"
        why = f"it could not be imported from {module} ({reason(error)})"
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("stagereg."):
            why = f"the module {error.name} is missing in this installation"
        raise InstallationError(f"`stagereg {name}` cannot run: {why}. {cure}.") from error
