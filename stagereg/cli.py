"""The command ``stagereg``: a dispatcher. Each sub-command is one module.

The module of a sub-command has ``add_to(commands)``, which adds a parser. The parser's default ``run`` takes the
arguments and returns the exit code; it imports what it needs when it runs. A parser with a default ``as_a_rank`` runs
in the environment that ``stagereg.main`` gives to ranks. Errors of the project are printed on one screen, without a
traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import stagereg.base.output as output
import stagereg.bench.command as bench
from stagereg._version import __version__
from stagereg.base.machine import become_a_rank
from stagereg.commands import (
    checking,
    converting,
    doctor,
    following,
    inventory,
    listing,
    reporting,
    running,
    scaffold,
)
from stagereg.errors import StageregError, nearest

_COMMANDS = (listing, running, scaffold, checking, doctor, bench, reporting, inventory, following, converting)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default those of the process, and return its exit code.

    0 is good, 2 is for a request that cannot be met, 130 is for an interruption, 141 for a reader that ended, and 1
    depends on the sub-command.
    """
    parser = argparse.ArgumentParser("stagereg", description="Checkpoint stagers, joins and checkpoints for PyTorch.")
    parser.add_argument("--version", action="version", version=f"stagereg {__version__}")
    parser.set_defaults(as_a_rank=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        command.add_to(commands)
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    if not given[0].startswith("-") and given[0] not in commands.choices:
        known = ", ".join(commands.choices)
        parser.error(f"no command {given[0]!r}.{nearest(given[0], commands.choices)} There is: {known}")
    asked = parser.parse_args(given)
    if arguments is None and asked.as_a_rank:
        become_a_rank("-m", "stagereg", *sys.argv[1:])
    try:
        code: int = asked.run(asked)
        sys.stdout.flush()
    except StageregError as error:
        output.warn(f"stagereg: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code
