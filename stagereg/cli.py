"""The command ``stagereg``: a dispatcher, which imports the module of the sub-command that is asked for.

The module of a sub-command has ``add_to(commands)``, which adds a parser. The parser's default ``run`` takes the
arguments and returns the exit code; it imports what it needs when it runs. A parser with a default ``as_a_rank`` runs
in the environment that ``stagereg.main`` gives to ranks. Errors of the project are printed on one screen, without a
traceback. Another package adds a sub-command by an entry point of the group ``stagereg.commands``: its name, and its
module.
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
    "follow": "stagereg.commands.following",
    "convert": "stagereg.commands.converting",
}
"""The modules of the project's own sub-commands, in the order of ``--help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default those of the process, and return its exit code.

    0 is good, 2 is for a request that cannot be met, 130 is for an interruption, 141 for a reader that ended, and 1
    depends on the sub-command.
    """
    parser = argparse.ArgumentParser("stagereg", description="Checkpoint stagers, joins and checkpoints for PyTorch.")
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
        output.warn(f"stagereg: `stagereg {given[0]}` cannot do that. {why}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _parsed(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace | None:
    """Return the parsed arguments; ``None`` if there are none, and the help is printed. Raises: ``StageregError``."""
    commands = parser.add_subparsers(required=True, metavar="command")
    name = given[0] if given and not given[0].startswith("-") else ""
    others = {} if name in BUILT_IN else _of_other_packages()
    known = {**others, **BUILT_IN}
    if name in known:
        _add(commands, name, known[name])
        return parser.parse_args(given)
    if name:
        parser.error(f"no command {name!r}.{nearest(name, known)} There is: {', '.join([*BUILT_IN, *sorted(others)])}")
    for module in dict.fromkeys([*BUILT_IN.values(), *others.values()]):
        added = [each for each in known if known[each] == module]
        try:
            _add(commands, added[0], module)
        except StageregError as error:  # it says so itself when it is asked for
            for each in (each for each in added if each not in commands.choices):
                commands.add_parser(each, help=f"not there: {error}")
    if not given:
        parser.print_help(sys.stderr)
        return None
    return parser.parse_args(given)


def _of_other_packages() -> dict[str, str]:
    """Return the modules of sub-commands of other packages, by name; of two with one name the first counts."""
    points, _ = announced(ENTRY_POINTS)
    return {point.name: point.module for _, _, point in reversed(points) if point.name not in BUILT_IN}


def _add(commands: Any, name: str, module: str) -> None:
    """Add the parser of a sub-command. Raises: ``InstallationError`` if its module cannot be imported."""
    try:
        importlib.import_module(module).add_to(commands)
    except Exception as error:
        cure = "Install hydra-stagereg again" if module.startswith("stagereg.") else "Install its package again"
        why = f"it could not be imported from {module} ({reason(error)})"
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("stagereg."):
            why = f"this installation has no {error.name}"
        raise InstallationError(f"`stagereg {name}` cannot run: {why}. {cure}.") from error
