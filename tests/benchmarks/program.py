"""Programs of this folder that print rows: options for groups of rows on several ranks, and running a program."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import stagereg.bench.command as command
from stagereg.base.machine import become_a_rank
from stagereg.bench.report import Group
from stagereg.errors import StageregError


def add_ranks(parser: argparse.ArgumentParser, models: Sequence[str], ranks: str) -> None:
    """Add options for groups of rows: some of ``models``, each on some numbers of ranks; see :func:`by_ranks`."""
    parser.set_defaults(models_there=lambda: models)
    add = parser.add_argument
    add("--models", default=",".join(models), help="models, with commas, %(default)s")
    add("--ranks", default=ranks, help="numbers of local ranks, with commas, %(default)s")


def by_ranks(group: Callable[..., Group]) -> Callable[[argparse.Namespace, Sequence[str]], list[Group]]:
    """What measures ``group(model, ranks, rows, rounds, scale, folder)`` for each model on each number of ranks."""

    def measure(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
        groups = []
        for model, ranks in itertools.product(asked.models, asked.ranks):
            with command.folder_below(asked.dir) as folder:
                groups.append(group(model, ranks, rows, asked.rounds, asked.scale, Path(folder)))
        return groups

    return measure


def main(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run a program as ``stagereg`` runs a command, with the arguments of the process by default."""
    if arguments is None:
        become_a_rank(*sys.argv)
    asked = parser.parse_args(arguments)
    try:
        if "ranks" in asked:
            asked.ranks = command.numbers("--ranks", asked.ranks)
            asked.models = command.known("model", asked.models, asked.models_there())
        return command.run(asked)
    except StageregError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
