"""``stagereg bench``: its command line, from what was asked for to the tables.

Everything that was asked for is checked before anything is measured. Imports no torch before that.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.errors import ConfigError, nearest

if TYPE_CHECKING:
    from stagereg.bench.measure import Case, Series, Stopwatch
    from stagereg.bench.report import Group
    from stagereg.bench.targets import Verdict

__all__ = ["add_to", "check_writable", "quiet", "run"]

_STATES = {"staging": "large,gpt,small,lora", "write": "gpt"}
_SCALES = {"staging": 1.0, "write": 1 / 3, "stall": 1.0}
_ROUNDS = {"staging": 11, "write": 9, "stall": 11, "join": 120}
_KINDS = {
    "staging": "how long a loop waits for a copy, against the memory's speed",
    "write": "how long a copy takes to be on the disk, against the disk's speed",
    "stall": "what a checkpoint costs the training it interrupts",
    "join": "what a join costs a training step, with all ranks having data",
    "endurance": "whether hundreds of checkpoints leave memory, files, threads or processes behind",
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the commands of ``stagereg``."""
    bench = commands.add_parser("bench", help="measure stagers, storages, checkpoints and joins beside torch's own")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="|".join(_KINDS))
    for kind, text in _KINDS.items():
        parser = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:] + ".")
        parser.set_defaults(run=run, as_a_rank=True)
        if kind == "endurance":
            _add_endurance(parser)
            continue
        parser.add_argument("--rounds", type=int, default=_ROUNDS[kind], help="rounds that count, %(default)s")
        parser.add_argument("--rows", default="", help="names of rows, with commas; all if not given")
        parser.add_argument("--json", metavar="FILE", default="", help="write every sample there too")
        if kind == "join":
            parser.set_defaults(device="cpu")
            parser.add_argument("--models", default="small,medium", help="models, with commas, %(default)s")
            parser.add_argument("--ranks", default="2,4", help="numbers of local ranks, with commas, %(default)s")
        else:
            _add_checkpoint(parser, kind)


def _add_endurance(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_endurance)
    parser.add_argument("--saves", type=int, default=500, help="how many checkpoints, %(default)s")
    parser.add_argument("--keep", type=int, default=2, help="how many of them stay, %(default)s")
    parser.add_argument("--stager", default="pinned_cached", help="by its name, %(default)s")
    parser.add_argument("--storage", default="dcp", help="by its name, %(default)s")
    parser.add_argument("--dir", default=".", help="a directory on the disk to write to, the current one")
    parser.add_argument("--json", metavar="FILE", default="", help="write the marks there too")


def _add_checkpoint(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument("--scale", type=float, default=_SCALES[kind], help="of the bytes, %(default).3g")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is, %(default)s")
    if kind in _STATES:
        parser.add_argument("--states", default=_STATES[kind], help="state dicts, with commas, %(default)s")
    if kind == "staging":
        parser.add_argument("--no-trim", action="store_true", help="leave freed memory in the heap between samples")
    else:
        parser.add_argument("--dir", default=".", help="a directory on the disk to write to, the current one")
    if kind == "stall":
        parser.add_argument("--torch-threads", default="1,2", help="each in a process of its own, %(default)s")


def run(asked: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON. Returns the exit code: 1 if a row failed.

    Raises:
        ConfigError: something that was asked for cannot be had; nothing was measured.
    """
    rows = _check(asked)
    import stagereg.bench.report as report
    import stagereg.machine as machine

    environment = machine.describe(asked.device)
    notes: list[str] = []
    if busy := machine.noise_warning(environment["load"][0], environment["cores"]):
        print(busy, file=sys.stderr, flush=True)
        notes.append(busy)
    with quiet():
        groups = _MEASURE[asked.kind](asked, rows, notes)
    if asked.kind in _SCALES and asked.scale != _SCALES[asked.kind]:
        notes.append("The targets are for full size: at this --scale the marks mean nothing.")
    verdicts = _verdicts(asked.kind, groups)
    print(report.tables(groups, verdicts, notes))
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if not callable(value)}
        content = {"environment": environment, "settings": settings, **report.plain(groups, verdicts, notes)}
        Path(asked.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(any(line.failure for group in groups for line in group.lines))


def _endurance(asked: argparse.Namespace) -> int:
    """Save, print the marks, write the JSON. Returns the exit code: 1 if something has grown.

    Raises:
        ConfigError: something that was asked for cannot be had; nothing was saved.
    """
    import stagereg.bench.endurance as endurance
    import stagereg.machine as machine
    import stagereg.registry as registry

    if asked.saves < endurance.MARKS:
        raise ConfigError(f"--saves must be at least {endurance.MARKS}, one for each mark, not {asked.saves}.")
    if asked.keep < 1:
        raise ConfigError(f"--keep must be at least 1, not {asked.keep}.")
    _check_json(asked.json)
    check_writable("--dir", Path(asked.dir))
    for kind in ("stager", "storage"):
        _known(kind, [getattr(asked, kind)], registry.names(kind))
    environment = machine.describe("cpu")
    with quiet(), _folder(asked.dir, []) as folder:
        marks = endurance.measured(asked.stager, asked.storage, asked.saves, asked.keep, folder)
    grown = endurance.grown(marks)
    print(f"endurance: {asked.stager}+{asked.storage}, {asked.saves} checkpoints of which {asked.keep} stay")
    print(endurance.table(marks))
    print("\n".join(["This has grown:", *grown]) if grown else "Nothing has grown.")
    if asked.json:
        settings = {name: value for name, value in vars(asked).items() if not callable(value)}
        content = {"environment": environment, "settings": settings, "marks": [vars(mark) for mark in marks]}
        Path(asked.json).write_text(json.dumps({**content, "grown": grown}, indent=1) + "\n")
    return int(bool(grown))


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the hints that are for the user of one stager, not for one of all stagers in turn."""
    log = logging.getLogger("stagereg")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


# -- what was asked for


def _check(asked: argparse.Namespace) -> list[str]:
    """Return the rows to be measured."""
    if asked.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {asked.rounds}.")
    if asked.kind in _SCALES and not 0 < asked.scale <= 1:
        raise ConfigError(f"--scale must be above 0 and at most 1, not {asked.scale:g}.")
    _check_json(asked.json)
    if asked.kind in ("write", "stall"):
        check_writable("--dir", Path(asked.dir))
    if asked.kind == "stall":
        asked.torch_threads = [_a_number("--torch-threads", text) for text in _names(asked.torch_threads)]
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU.")
    if asked.kind in _STATES:
        from stagereg.bench.states import STATES

        asked.states = _known("state", _names(asked.states), list(STATES))
    if asked.kind == "join":
        from stagereg.bench.join_rank import MODELS

        asked.ranks = [_a_number("--ranks", text) for text in _names(asked.ranks)]
        asked.models = _known("model", _names(asked.models), list(MODELS))
    there = _rows(asked)
    return _known("row", _names(asked.rows), there) if asked.rows else there


def _check_json(file: str) -> None:
    """Raise ``ConfigError`` if no result can be written to ``file``; empty is none."""
    if file:
        target = Path(file).absolute()
        if target.is_dir():
            raise ConfigError(f"--json {file} is a directory; name a file.")
        check_writable("--json", target.parent)


def check_writable(option: str, folder: Path) -> None:
    """Raise ``ConfigError`` if no file can be made in ``folder``, which ``option`` of a command line names."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write in {folder}: {error.strerror}.") from error


def _a_number(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option} takes whole numbers from 1 on, not {text!r}.")
    return int(text)


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError("There is nothing to measure: an option that takes names was given none.")
    return list(dict.fromkeys(names))


def _known(what: str, given: Sequence[str], there: Sequence[str]) -> list[str]:
    for name in given:
        if name not in there:
            raise ConfigError(f"There is no {what} {name!r}.{nearest(name, there)}\nThere is: {', '.join(there)}")
    return list(given)


def _rows(asked: argparse.Namespace) -> list[str]:
    import stagereg.bench.join_rows as join
    import stagereg.bench.staging as staging
    import stagereg.bench.stall as stall
    import stagereg.bench.write as write

    if asked.kind == "staging":
        return staging.row_names(asked.device)
    return {"write": write, "stall": stall, "join": join}[asked.kind].row_names()


# -- measuring


def _staging(asked: argparse.Namespace, rows: Sequence[str], notes: list[str]) -> list[Group]:
    import stagereg.bench.report as report
    import stagereg.bench.staging as staging
    import stagereg.bench.states as states

    groups = []
    for name in asked.states:
        state = states.make(name, asked.scale, asked.device)
        taken = _interleaved(asked, rows, staging.cases(state, asked.device), name, state.change, not asked.no_trim)
        title = f"staging {name}: {state.nbytes / 2**20:.1f} MiB in {state.count} tensors"
        groups.append(report.of_series(name, title, taken, staging.CEILING))
    return groups


def _write(asked: argparse.Namespace, rows: Sequence[str], notes: list[str]) -> list[Group]:
    import stagereg.bench.report as report
    import stagereg.bench.states as states
    import stagereg.bench.write as write

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)

    groups = []
    for name in asked.states:
        state = states.make(name, asked.scale, asked.device)
        with _folder(asked.dir, notes) as folder:
            taken = _interleaved(asked, rows, write.cases(state, folder, note), name)
        title = f"write {name}: {state.nbytes / 2**20:.1f} MiB in {state.count} tensors, durable"
        groups.append(report.of_series(name, title, taken, write.CEILING))
    return groups


def _stall(asked: argparse.Namespace, rows: Sequence[str], notes: list[str]) -> list[Group]:
    import stagereg.bench.stall as stall

    groups = []
    for threads in asked.torch_threads:
        with _folder(asked.dir, notes) as folder:
            wanted = [stall.BASE, *(row for row in rows if row != stall.BASE)]
            taken = stall.measured(wanted, asked.rounds, threads, asked.scale, asked.device, folder)
        groups.append(stall.group(str(threads), f"stall: {threads} torch threads", taken))
    return groups


def _join(asked: argparse.Namespace, rows: Sequence[str], notes: list[str]) -> list[Group]:
    import stagereg.bench.join_rows as join

    pairs = [(model, ranks) for model in asked.models for ranks in asked.ranks]
    return [join.group(*pair, join.measured(*pair, rows, asked.rounds)) for pair in pairs]


_MEASURE = {"staging": _staging, "write": _write, "stall": _stall, "join": _join}


def _interleaved(
    asked: argparse.Namespace,
    rows: Sequence[str],
    cases: Sequence[Case],
    state: str,
    before_round: Callable[[], None] = lambda: None,
    trim: bool = True,
) -> list[Series]:
    """Measure the cases of which a row is wanted, and the ceiling, which the others are a ratio to."""
    import stagereg.bench.measure as measure
    import stagereg.bench.report as report

    ceiling = cases[0].rows[0]
    wanted = [case for case in cases if case.rows[0] == ceiling or set(case.rows) & set(rows)]
    show = report.progress(f"{asked.kind} {state}", asked.rounds, sys.stderr)
    taken = measure.interleave(wanted, asked.rounds, _watch(asked.device), before_round, show, trim)
    return [one for one in taken if one.row == ceiling or one.row in rows]


def _watch(device: str) -> Stopwatch:
    from stagereg.bench.measure import Stopwatch

    if device == "cpu":
        return Stopwatch()
    import torch

    return Stopwatch(torch.cuda.synchronize)


@contextmanager
def _folder(root: str, notes: list[str]) -> Iterator[Path]:
    """A fresh directory on the file system of ``root``, gone afterwards."""
    from stagereg.machine import file_system

    folder = Path(tempfile.mkdtemp(prefix="stagereg-bench-", dir=root)).absolute()
    text = f"--dir {root} is memory ({file_system(folder)}), not a disk: the figures are not those of a disk."
    if file_system(folder) in ("tmpfs", "ramfs") and text not in notes:
        notes.append(text)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdicts(kind: str, groups: Sequence[Group]) -> list[Verdict]:
    import stagereg.bench.report as report
    from stagereg.bench.targets import TARGETS, judge

    figures = report.figures(groups)
    noise = _noise(kind, groups)
    measured = {group.name for group in groups}
    asked = [target for target in TARGETS if target.kind == kind and target.group in measured]
    return [judge(target, figures, noise.get(target.group, 0.0)) for target in asked]


def _noise(kind: str, groups: Sequence[Group]) -> dict[str, float]:
    """The noise of the run by group, in the unit of that kind's targets."""
    import stagereg.bench.join_rows as join
    import stagereg.bench.stall as stall
    from stagereg.bench.measure import spread

    row = {"stall": f"again:{stall.BASE}", "join": join.AGAIN}.get(kind)
    again = {g.name: line.samples for g in groups for line in g.lines if line.row == row and line.samples}
    if kind == "join":
        return {name: join.noise(samples["x"]) for name, samples in again.items()}
    return {name: max(abs(edge) for edge in spread(samples["lost"])) * 1e3 for name, samples in again.items()}
