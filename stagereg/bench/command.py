"""``stagereg bench``: its command line, from what was asked for to the tables.

Everything that was asked for is checked before anything is measured. Imports no torch before that. The programs of
``tests/benchmarks`` that measure rows have the same options and tables, by :func:`add_options` and :func:`main`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.bench.measure import interleave, peaks, quiet
from stagereg.errors import ConfigError, StageregError, nearest
from stagereg.machine import become_a_rank

if TYPE_CHECKING:
    from stagereg.bench.measure import Case
    from stagereg.bench.report import Group
    from stagereg.bench.states import State

_Measure = Callable[[argparse.Namespace, Sequence[str]], "list[Group]"]

_STATES = {"staging": "large,gpt,small", "write": "gpt"}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure stagers, storages and checkpoints beside torch's own ways")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="|".join(_KINDS))
    for kind, (text, rounds, there, measure) in _KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:] + ".")
        parser.set_defaults(as_a_rank=True)
        scale = 1 / 3 if kind == "write" else 1.0
        add_options(parser, rounds, there, measure, disk=kind != "staging", scale=scale)
        add = parser.add_argument
        if kind == "restore":
            add_ranks(parser, ["ddp", "fsdp2"], "1,2,4")
        else:
            add("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is, %(default)s")
        if kind in _STATES:
            add("--states", default=_STATES[kind], help="state dicts, with commas, %(default)s")
        if kind == "stall":
            add("--torch-threads", default="1,2", help="each in a process of its own, %(default)s")


def add_options(
    parser: argparse.ArgumentParser,
    rounds: int,
    there: Callable[[argparse.Namespace], list[str]],
    measure: _Measure,
    disk: bool = True,
    scale: float | None = 1.0,
) -> None:
    """Add the options that all have who measure rows, and what they do.

    Args:
        rounds: how many count, if not said otherwise.
        there: returns the names of all rows.
        measure: measures some of them.
        disk: whether it writes to one.
        scale: of the bytes, if not said otherwise; ``None`` where there is none.
    """
    parser.set_defaults(run=run, there=there, measure=measure, device="cpu")
    add = parser.add_argument
    add("--json", metavar="FILE", default="", help="write every sample there too")
    if disk:
        add("--dir", default=".", help="a directory on the disk to write to, the current one")
    add("--rounds", type=int, default=rounds, help="rounds that count, %(default)s")
    add("--rows", default="", help="names of rows, with commas; all if not given")
    if scale is not None:
        add("--scale", type=float, default=scale, help="of the bytes, %(default).3g")


def add_ranks(parser: argparse.ArgumentParser, models: Sequence[str], ranks: str) -> None:
    """Add options for groups of rows: some of ``models``, each on some numbers of ranks; see :func:`by_ranks`."""
    parser.set_defaults(models_there=lambda: models)
    add = parser.add_argument
    add("--models", default=",".join(models), help="models, with commas, %(default)s")
    add("--ranks", default=ranks, help="numbers of local ranks, with commas, %(default)s")


def main(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run a program as ``stagereg`` runs a command, with the arguments of the process by default."""
    if arguments is None:
        become_a_rank(*sys.argv)
    asked = parser.parse_args(arguments)
    try:
        return run(asked)
    except StageregError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def run(asked: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON. Returns the exit code: 1 if a row failed.

    Raises:
        ConfigError: something that was asked for cannot be had; nothing was measured.
    """
    rows = _check(asked)
    import stagereg.bench.report as report
    import stagereg.machine as machine

    environment = machine.describe(asked.device)
    notes = [machine.noise_warning(environment["load"][0], environment["cores"])]
    if "dir" in asked and machine.file_system(Path(asked.dir)) in ("tmpfs", "ramfs"):
        notes.append(f"--dir {asked.dir} is memory, not a disk: the figures are not those of a disk.")
    notes = [note for note in notes if note]
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    with quiet():
        groups = asked.measure(asked, rows)
    report.show(groups)
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if not callable(value)}
        content = {"environment": environment, "settings": settings, "notes": notes, **report.plain(groups)}
        Path(asked.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(any(line.failure for group in groups for line in group.lines))


def by_ranks(group: Callable[..., Group]) -> _Measure:
    """What measures ``group(model, ranks, rows, rounds, scale, folder)`` for each model on each number of ranks."""

    def measure(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
        groups = []
        for model, ranks in itertools.product(asked.models, asked.ranks):
            with folder_below(asked.dir) as folder:
                groups.append(group(model, ranks, rows, asked.rounds, asked.scale, Path(folder)))
        return groups

    return measure


def folder_below(root: str | None) -> tempfile.TemporaryDirectory[str]:
    """A fresh directory below ``root``, to be entered."""
    root = root and os.path.abspath(root)
    return tempfile.TemporaryDirectory(prefix="stagereg-bench-", dir=root, ignore_cleanup_errors=True)


def _check(asked: argparse.Namespace) -> list[str]:
    import torch

    from stagereg.bench.states import STATES

    if asked.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {asked.rounds}.")
    if "scale" in asked and not 0 < asked.scale <= 1:
        raise ConfigError(f"--scale must be above 0 and at most 1, not {asked.scale:g}.")
    if asked.json:
        _check_writable("--json", Path(asked.json).absolute().parent)
        if Path(asked.json).is_dir():
            raise ConfigError(f"--json {asked.json} is a directory; name a file.")
    if "dir" in asked:
        _check_writable("--dir", Path(asked.dir))
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU.")
    if "states" in asked:
        asked.states = _known("state", asked.states, list(STATES))
    if "torch_threads" in asked:
        asked.torch_threads = _numbers("--torch-threads", asked.torch_threads)
    if "ranks" in asked:
        asked.ranks = _numbers("--ranks", asked.ranks)
        asked.models = _known("model", asked.models, asked.models_there())
    there = asked.there(asked)
    return _known("row", asked.rows, there) if asked.rows else there


def _check_writable(option: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in {folder}: {error.strerror}.") from error


def _numbers(option: str, text: str) -> list[int]:
    names = _names(text)
    if wrong := [name for name in names if not name.isdecimal() or not int(name)]:
        raise ConfigError(f"{option} takes whole numbers from 1 on, not {wrong[0]!r}.")
    return list(map(int, names))


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError("There is nothing to measure: an option that takes names was given none.")
    return list(dict.fromkeys(names))


def _known(what: str, text: str, there: Sequence[str]) -> list[str]:
    names = _names(text)
    if wrong := [name for name in names if name not in there]:
        raise ConfigError(f"There is no {what} {wrong[0]!r}.{nearest(wrong[0], there)}\nThere is: {', '.join(there)}")
    return names


def _cases(asked: argparse.Namespace, state: State, folder: Path) -> list[Case]:
    import stagereg.bench.staging as staging
    import stagereg.bench.write as write

    return write.cases(state, folder) if asked.kind == "write" else staging.cases(state, asked.device)


def _row_names(asked: argparse.Namespace) -> list[str]:
    return list(importlib.import_module(f"stagereg.bench.{asked.kind}").row_names())


def _series_rows(asked: argparse.Namespace) -> list[str]:
    from stagereg.bench.states import State

    return [row for case in _cases(asked, State({}), Path()) for row in case.rows]


def _series(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    """Measure staging, or writing: the cases of which a row is wanted, and the ceiling, which they are a ratio to."""
    import torch

    import stagereg.bench.report as report
    import stagereg.bench.states as states
    from stagereg.bench.ceiling import ROW

    groups = []
    for name in asked.states:
        state = states.make(name, asked.scale, asked.device)
        count = len(states.tensors(state.tree))
        title = f"{asked.kind} {name}: {state.nbytes / 2**20:.1f} MiB in {count} tensors"
        settle = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
        change = state.change if asked.kind == "staging" else lambda: None
        with folder_below(asked.dir if asked.kind == "write" else None) as folder:
            wanted = [case for case in _cases(asked, state, Path(folder)) if {*case.rows} & {ROW, *rows}]
            taken = interleave(wanted, asked.rounds, settle, change, f"{asked.kind} {name}")
            peak = {row: nbytes / state.nbytes for row, nbytes in peaks(wanted).items()}
        series = [one for one in taken if one.row in (ROW, *rows)]
        groups.append(report.of_series(name, title, series, ROW, peak))
    return groups


def _stall(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.stall as stall

    groups = []
    for threads in asked.torch_threads:
        with folder_below(asked.dir) as folder:
            wanted = [stall.BASE, *(row for row in rows if row != stall.BASE)]
            taken = stall.measured(wanted, asked.rounds, threads, asked.scale, asked.device, Path(folder))
        groups.append(stall.group(str(threads), f"stall: {threads} torch threads", taken))
    return groups


def _restore(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.restore as restore

    return by_ranks(restore.group)(asked, rows)


_KINDS: dict[str, tuple[str, int, Callable[[argparse.Namespace], list[str]], _Measure]] = {
    "staging": ("how long a loop waits for a copy, against the memory's speed", 11, _series_rows, _series),
    "write": ("how long a copy takes to be on the disk, against the disk's speed", 9, _series_rows, _series),
    "stall": ("what a checkpoint costs the training it interrupts", 20, _row_names, _stall),
    "restore": ("how long ranks restore, and what each reads, against the page cache", 9, _row_names, _restore),
}
"""What each is for, its rounds, the names of its rows, and what measures them."""
