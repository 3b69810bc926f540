"""The command line of ``stagereg bench``.

All arguments are checked before the measurement starts. Importing this module does not import torch. The programs in
``tests/benchmarks`` use :func:`add_options` and :func:`run`, so they have the same options and tables.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.base.number_text import decimal
from stagereg.base.output import warn
from stagereg.bench.environment import describe, noise_warning
from stagereg.bench.measure import interleave, peaks, quiet
from stagereg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stagereg.bench.measure import Case
    from stagereg.bench.report import Group
    from stagereg.bench.states import State

_Measure = Callable[[Namespace, Sequence[str]], "list[Group]"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure stagers, storages and checkpoints, compared with torch's own")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="|".join(_KINDS))
    for kind, (text, rounds, there, measure) in _KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:] + ".")
        parser.set_defaults(as_a_rank=True)
        add_options(parser, rounds, there, measure, disk=kind == "stall")
        add = parser.add_argument
        add("--device", choices=["cpu", "cuda"], default="cpu", help="device of the state; default: %(default)s")
        if kind == "staging":
            add("--states", default="large,gpt,small", help="comma-separated state dicts; default: %(default)s")
        else:
            add("--torch-threads", default="1,2", help="comma-separated numbers of torch threads; default: %(default)s")


def add_options(
    parser: argparse.ArgumentParser,
    rounds: int,
    there: Callable[[Namespace], list[str]],
    measure: _Measure,
    disk: bool = True,
    scale: float | None = 1.0,
) -> None:
    """Add options to ``parser``. ``there`` returns the names of all rows, ``measure`` measures the selected rows.

    ``disk``: whether the benchmark writes files. ``scale``: the default of ``--scale``; ``None`` omits this option.
    """
    parser.set_defaults(run=run, there=there, measure=measure, device="cpu")
    add = parser.add_argument
    add("--json", metavar="FILE", default="", help="also write every sample to this file")
    if disk:
        add("--dir", default=".", help="directory on the disk to measure; default: the current directory")
    add("--rounds", type=int, default=rounds, help="measured rounds, after one warm-up round; default: %(default)s")
    add("--rows", default="", help="comma-separated names of rows; default: all")
    if scale is not None:
        add("--scale", type=float, default=scale, help="fraction of the state's bytes to use; default: %(default).3g")


def run(asked: Namespace) -> int:
    """Measure, print the tables and write the JSON file. Return 1 if a row failed, otherwise 0.

    Raises: ``ConfigError`` if an argument is invalid, before the measurement.
    """
    rows = _check(asked)
    import stagereg.bench.report as report
    from stagereg.base.machine import file_system

    environment = describe(asked.device)
    notes = [noise_warning(environment["load"][0], environment["cores"])]
    if "dir" in asked and file_system(Path(asked.dir)) in ("tmpfs", "ramfs"):
        notes.append(f"--dir {asked.dir} is in memory, so the results do not show the speed of a disk.")
    notes = [note for note in notes if note]
    for note in notes:
        warn(note)
    with quiet():
        groups = asked.measure(asked, rows)
    report.show(groups)
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if not callable(value)}
        content = {"environment": environment, "settings": settings, "notes": notes, **report.plain(groups)}
        Path(asked.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(any(line.failure for group in groups for line in group.lines))


def folder_below(root: str) -> tempfile.TemporaryDirectory[str]:
    """Return a context manager that creates a temporary directory under ``root``."""
    return tempfile.TemporaryDirectory(prefix="stagereg-bench-", dir=os.path.abspath(root), ignore_cleanup_errors=True)


def _check(asked: Namespace) -> list[str]:
    import torch

    from stagereg.bench.states import STATES

    if asked.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {asked.rounds}.")
    if "scale" in asked and not 0 < asked.scale <= 1:
        raise ConfigError(f"--scale must be above 0 and at most 1, got {asked.scale:g}.")
    if asked.json:
        _check_writable("--json", Path(asked.json).absolute().parent)
        if Path(asked.json).is_dir():
            raise ConfigError(f"--json {asked.json} is a directory. Name a file.")
    if "dir" in asked:
        _check_writable("--dir", Path(asked.dir))
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device. Omit --device to measure on the CPU.")
    if "states" in asked:
        asked.states = known("state", asked.states, list(STATES))
    if "torch_threads" in asked:
        asked.torch_threads = numbers("--torch-threads", asked.torch_threads)
    there = asked.there(asked)
    return known("row", asked.rows, there) if asked.rows else there


def _check_writable(option: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in {folder}: {error.strerror}") from error


def numbers(option: str, text: str) -> list[int]:
    """Parse the comma-separated positive integers of an option. Raises ``ConfigError`` for other text."""
    names = _names(text)
    found = [decimal(name) or 0 for name in names]
    if 0 in found:
        raise ConfigError(f"{option} requires integers of at least 1, got {names[found.index(0)]!r}.")
    return found


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError("Nothing to measure: an option with a list of names is empty.")
    return list(dict.fromkeys(names))


def known(what: str, text: str, there: Sequence[str]) -> list[str]:
    """Parse the comma-separated names of an option. Raises ``ConfigError`` for a name that is not in ``there``."""
    names = _names(text)
    if wrong := [name for name in names if name not in there]:
        raise ConfigError(f"unknown {what} {wrong[0]!r}.{nearest(wrong[0], there)}\nChoose from: {', '.join(there)}")
    return names


def _staging_rows(asked: Namespace) -> list[str]:
    import stagereg.bench.staging as staging
    from stagereg.bench.states import State

    return [row for case in staging.cases(State({}), asked.device) for row in case.rows]


def _staging(asked: Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.staging as staging

    return by_states("staging", lambda state: staging.cases(state, asked.device), asked, rows)


def by_states(kind: str, cases: Callable[[State], list[Case]], asked: Namespace, rows: Sequence[str]) -> list[Group]:
    """For each state dict, measure the selected ``rows`` and the ceiling by which their times are divided."""
    import torch

    import stagereg.bench.report as report
    import stagereg.bench.states as states
    from stagereg.bench.ceiling import ROW

    groups = []
    for name in asked.states:
        state = states.make(name, asked.scale, asked.device)
        count = len(states.tensors(state.tree))
        title = f"{kind} {name}: {state.nbytes / 2**20:.1f} MiB in {count} tensors"
        settle = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
        wanted = [case for case in cases(state) if {*case.rows} & {ROW, *rows}]
        taken = interleave(wanted, asked.rounds, settle, state.change, f"{kind} {name}")
        peak = {row: nbytes / state.nbytes for row, nbytes in peaks(wanted).items()}
        groups.append(report.of_series(name, title, [one for one in taken if one.row in (ROW, *rows)], ROW, peak))
    return groups


def _stall_rows(asked: Namespace) -> list[str]:
    import stagereg.bench.stall as stall

    return stall.row_names()


def _stall(asked: Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.stall as stall

    groups = []
    for threads in asked.torch_threads:
        with folder_below(asked.dir) as folder:
            wanted = [stall.BASE, *(row for row in rows if row != stall.BASE)]
            taken = stall.measured(wanted, asked.rounds, threads, asked.scale, asked.device, Path(folder))
        groups.append(stall.group(str(threads), f"stall: {threads} torch threads", taken))
    return groups


_KINDS: dict[str, tuple[str, int, Callable[[Namespace], list[str]], _Measure]] = {
    "staging": ("measure the wait for a staged copy, relative to memory speed", 11, _staging_rows, _staging),
    "stall": ("measure how much training time a checkpoint costs", 20, _stall_rows, _stall),
}
"""By benchmark: help text, default number of rounds, function that lists the rows, function that measures them."""
