"""``stagereg bench``: its command line, from what was asked for to the tables.

Everything that was asked for is checked before anything is measured. Imports no torch before that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagereg.bench.measure import in_own_process, interleave, peaks, quiet
from stagereg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stagereg.bench.measure import Case
    from stagereg.bench.report import Group
    from stagereg.bench.states import State

_KINDS = {
    "staging": "how long a loop waits for a copy, against the memory's speed",
    "write": "how long a copy takes to be on the disk, against the disk's speed",
    "stall": "what a checkpoint costs the training it interrupts",
    "integrations": "what a checkpoint costs training, saved by the trainer itself and through stagereg",
    "join": "what a join costs a training step, with all ranks having data",
    "replicas": "how long ranks save what they hold alike or have split, and what each stages and writes",
    "restore": "how long ranks restore it, and what each reads, against the page cache's speed",
    "endurance": "whether hundreds of checkpoints leave memory, files, threads or processes behind",
}
_ROUNDS = {"staging": 11, "write": 9, "stall": 20, "integrations": 9, "join": 120, "replicas": 9, "restore": 9}
_STATES = {"staging": "large,gpt,small,lora", "write": "gpt"}
_MODELS = {"join": "small,medium", "replicas": "ddp,fsdp2", "restore": "ddp,fsdp2"}
_RANKS = {"join": "2,4", "replicas": "1,2,4", "restore": "1,2,4"}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the commands of ``stagereg``."""
    bench = commands.add_parser("bench", help="measure stagers, storages, checkpoints and joins beside torch's own")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="|".join(_KINDS))
    for kind, text in _KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:] + ".")
        parser.set_defaults(run=run, as_a_rank=True, device="cpu")
        add = parser.add_argument
        add("--json", metavar="FILE", default="", help="write every sample there too")
        if kind not in ("staging", "join"):
            add("--dir", default=".", help="a directory on the disk to write to, the current one")
        if kind == "endurance":
            add("--saves", type=int, default=500, help="how many checkpoints, %(default)s")
            add("--keep", type=int, default=2, help="how many of them stay, %(default)s")
            add("--stager", default="pinned_cached", help="by its name, %(default)s")
            add("--storage", default="dcp", help="by its name, %(default)s")
            continue
        add("--rounds", type=int, default=_ROUNDS[kind], help="rounds that count, %(default)s")
        add("--rows", default="", help="names of rows, with commas; all if not given")
        if kind != "join":
            add("--scale", type=float, default=1 / 3 if kind == "write" else 1.0, help="of the bytes, %(default).3g")
        if kind in _MODELS:
            add("--models", default=_MODELS[kind], help="models, with commas, %(default)s")
            add("--ranks", default=_RANKS[kind], help="numbers of local ranks, with commas, %(default)s")
            continue
        if kind == "integrations":
            continue
        add("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is, %(default)s")
        if kind in _STATES:
            add("--states", default=_STATES[kind], help="state dicts, with commas, %(default)s")
        if kind == "stall":
            add("--torch-threads", default="1,2", help="each in a process of its own, %(default)s")


def run(asked: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON. Returns the exit code: 1 if a row failed, or something has grown.

    Raises:
        ConfigError: something that was asked for cannot be had; nothing was measured.
    """
    rows = _check(asked)
    import stagereg.machine as machine

    environment = machine.describe(asked.device)
    notes = [machine.noise_warning(environment["load"][0], environment["cores"])]
    if "dir" in asked and machine.file_system(Path(asked.dir)) in ("tmpfs", "ramfs"):
        notes.append(f"--dir {asked.dir} is memory, not a disk: the figures are not those of a disk.")
    notes = [note for note in notes if note]
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    with quiet():
        found, failed = (_endurance if asked.kind == "endurance" else _tables)(asked, rows)
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if not callable(value)}
        content = {"environment": environment, "settings": settings, "notes": notes, **found}
        Path(asked.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(failed)


# -- what was asked for


def _check(asked: argparse.Namespace) -> list[str]:
    """Return the rows to be measured; of ``endurance`` the stager and the storage."""
    import torch

    import stagereg.bench.endurance as endurance
    import stagereg.bench.integration_rows as integrations
    import stagereg.bench.join_rows as join
    import stagereg.bench.replicas as replicas
    import stagereg.bench.stall as stall
    import stagereg.registry as registry
    from stagereg.bench.states import STATES, State

    for name, least in (("rounds", 1), ("saves", endurance.MARKS), ("keep", 1)):
        if name in asked and vars(asked)[name] < least:
            raise ConfigError(f"--{name} must be at least {least}, not {vars(asked)[name]}.")
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
    if asked.kind == "endurance":
        return [
            name for kind in ("stager", "storage") for name in _known(kind, vars(asked)[kind], registry.names(kind))
        ]
    if asked.kind in _STATES:
        asked.states = _known("state", asked.states, list(STATES))
        there = [row for case in _cases(asked, State({}), Path()) for row in case.rows]
    elif asked.kind == "stall":
        asked.torch_threads = _numbers("--torch-threads", asked.torch_threads)
        there = stall.row_names()
    elif asked.kind == "integrations":
        there = integrations.row_names()
    else:
        asked.ranks = _numbers("--ranks", asked.ranks)
        asked.models = _known("model", asked.models, list(join.MODELS if asked.kind == "join" else replicas.MODELS))
        there = join.row_names() if asked.kind == "join" else replicas.row_names(asked.kind)
    return _known("row", asked.rows, there) if asked.rows else there


def _check_writable(option: str, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in {folder}: {error.strerror}.") from error


def _numbers(option: str, text: str) -> list[int]:
    for name in _names(text):
        if not name.isdecimal() or not int(name):
            raise ConfigError(f"{option} takes whole numbers from 1 on, not {name!r}.")
    return [int(name) for name in _names(text)]


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError("There is nothing to measure: an option that takes names was given none.")
    return list(dict.fromkeys(names))


def _known(what: str, text: str, there: Sequence[str]) -> list[str]:
    for name in _names(text):
        if name not in there:
            raise ConfigError(f"There is no {what} {name!r}.{nearest(name, there)}\nThere is: {', '.join(there)}")
    return _names(text)


# -- measuring


def _cases(asked: argparse.Namespace, state: State, folder: Path) -> list[Case]:
    import stagereg.bench.staging as staging
    import stagereg.bench.write as write

    return write.cases(state, folder) if asked.kind == "write" else staging.cases(state, asked.device)


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
        with _folder(asked.dir if asked.kind == "write" else None) as folder:
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
        with _folder(asked.dir) as folder:
            wanted = [stall.BASE, *(row for row in rows if row != stall.BASE)]
            taken = stall.measured(wanted, asked.rounds, threads, asked.scale, asked.device, Path(folder))
        groups.append(stall.group(str(threads), f"stall: {threads} torch threads", taken))
    return groups


def _integrations(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.integration_rows as integrations

    groups = []
    for trainer in dict.fromkeys(row.partition(":")[0] for row in rows):
        own = [row for row in integrations.row_names() if row.startswith(f"{trainer}:")]
        wanted = [row for row in own if row in rows or row == own[0]]  # the first is the one without a checkpoint
        with _folder(asked.dir) as folder:
            groups.append(integrations.group(trainer, wanted, asked.rounds, asked.scale, Path(folder)))
    return groups


def _join(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.join_rows as join

    pairs = [(model, ranks) for model in asked.models for ranks in asked.ranks]
    return [join.group(*pair, join.measured(*pair, rows, asked.rounds)) for pair in pairs]


def _replicas(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    import stagereg.bench.replicas as replicas

    groups = []
    for case in [(asked.kind, model, ranks) for model in asked.models for ranks in asked.ranks]:
        with _folder(asked.dir) as folder:
            taken = replicas.measured(*case, rows, asked.rounds, asked.scale, Path(folder))
        groups.append(replicas.group(*case, taken))
    return groups


_MEASURE: dict[str, Callable[[argparse.Namespace, Sequence[str]], list[Group]]] = {
    "staging": _series,
    "write": _series,
    "stall": _stall,
    "integrations": _integrations,
    "join": _join,
    "replicas": _replicas,
    "restore": _replicas,
}


def _tables(asked: argparse.Namespace, rows: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Print the tables; return the same for JSON, and whether a row failed."""
    import stagereg.bench.report as report

    groups = _MEASURE[asked.kind](asked, rows)
    report.show(groups)
    return report.plain(groups), any(line.failure for group in groups for line in group.lines)


def _endurance(asked: argparse.Namespace, rows: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Print the marks; return the same for JSON, and whether something has grown."""
    import stagereg.bench.endurance as endurance

    with _folder(asked.dir) as folder:
        # One thread of torch's: a pool of them would be counted, and comes up whenever torch likes.
        arguments = (asked.stager, asked.storage, asked.saves, asked.keep, Path(folder))
        marks = in_own_process(endurance.endure, *arguments, OMP_NUM_THREADS="1")
    grown = endurance.grown(marks)
    title = f"endurance: {asked.stager}+{asked.storage}, {asked.saves} checkpoints of which {asked.keep} stay"
    endurance.show(title, marks)
    print("\n".join(["This has grown:", *grown] if grown else ["Nothing has grown."]))
    return {"marks": marks, "grown": grown}, bool(grown)


def _folder(root: str | None) -> tempfile.TemporaryDirectory[str]:
    """A fresh directory below ``root``, to be entered."""
    root = root and os.path.abspath(root)
    return tempfile.TemporaryDirectory(prefix="stagereg-bench-", dir=root, ignore_cleanup_errors=True)
