"""Implements ``stagereg ls`` and ``stagereg verify`` for a local tier: the steps on this machine and their copies.

The argument is the folder of a tier (``tier.dir``), of one of its runs, or of one step. The commands read only
files of this machine, change nothing and acquire no lock. A step that a run deletes during the command is omitted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import stagereg.base.output as output
from stagereg.base.machine import boot_id
from stagereg.base.output import size_text
from stagereg.base.small_files import open_regular
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import InaccessibleFile, damage_of, difference
from stagereg.checkpoint.format.manifest import FileDigest, step_of
from stagereg.checkpoint.store.lock import Owner, holder
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.folder import BOOT, NOTE, names_part, notes_of_part, read_or_skip, read_part
from stagereg.extensions.tiers.inventory import ROLLED_BACK, Lineage, lineage_of
from stagereg.extensions.tiers.part import TOKEN, Part, PartFile

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class _Part(NamedTuple):
    part: Part | None  # None if its manifest is corrupt
    rank: int
    copied: tuple[str, ...]  # the machines that have acknowledged a copy
    received: bool  # whether the part is a copy of a part that another machine wrote
    time: float  # modification time of the manifest, seconds since the epoch
    damages: dict[str, str]  # name of a file -> reason why the file is corrupt or inaccessible


class _Step(NamedTuple):
    """One save on this machine. ``parts`` is in rank order; ``void`` is why the save is void, or empty if it is not."""

    path: str
    parts: list[_Part]
    void: str

    @property
    def readable(self) -> Part | None:
        """A part with a valid manifest, which identifies the save."""
        return next((each.part for each in self.parts if each.part is not None), None)

    @property
    def step(self) -> int:
        return step_of(os.path.basename(self.path)) or 0

    @property
    def order(self) -> tuple[int, int]:
        """The sort key, which is greater for later saves and greatest for steps without a valid manifest."""
        return (1 << 62, self.step) if self.readable is None else self.readable.save.order

    @property
    def nbytes(self) -> int:
        return sum(each.part.nbytes for each in self.parts if each.part is not None)

    @property
    def damages(self) -> dict[str, str]:
        return {name: what for each in self.parts for name, what in each.damages.items()}

    @property
    def state(self) -> str:
        """``corrupt``, ``unclear`` (inaccessible), ``void``, ``unfinished``, ``copied`` or ``written`` (not copied)."""
        if damages := self.damages.values():
            return "unclear" if all(isinstance(what, InaccessibleFile) for what in damages) else "corrupt"
        if self.void or not self.parts:
            return "void" if self.void else "unfinished"
        return "copied" if all(each.received or each.copied for each in self.parts) else "written"


class _Run(NamedTuple):
    """One run on this machine: its steps, the latest first, and the process that holds its lock now."""

    path: str
    steps: list[_Step]
    held_by: Owner | None

    def newest(self, *states: str) -> _Step | None:
        return next((each for each in self.steps if each.state in states), None)


# -- the commands


def list_steps(asked: argparse.Namespace) -> int | None:
    """Print the steps of a tier and return 0; return ``None`` if ``asked.directory`` is not a tier."""
    runs = _runs(asked.directory, asked.verify)
    if not runs:
        return None
    if asked.json:
        output.as_json({"tier": os.path.realpath(asked.directory), "runs": [_plain(each) for each in runs]})
        return 0
    columns = ("step", "branch", "age", "size", "ranks here", "state", "")
    for number, run in enumerate(runs):
        rows = [(*_cells(each, columns[:-1], run), _more(each)) for each in run.steps]
        output.echo() if number else None
        output.table(f"{run.path}: on this machine", columns, rows, verdict="state")
        output.echo(f"\n{_judgement(run)}")
        if run.held_by is not None:
            output.echo(f"Locked by {run.held_by}")
    return 0


def verify_steps(asked: argparse.Namespace) -> int | None:
    """Verify the steps of a tier and print the results. Return 0 if all steps are valid, otherwise 1.

    Return ``None`` if ``asked.directory`` is not a tier. Raises: ``CheckpointError`` if the tier has no step.
    """
    runs = _runs(asked.directory, not asked.fast)
    if not runs:
        return None
    steps = [step for run in runs for step in run.steps if step.parts]
    if not steps:
        raise CheckpointError(f"The local tier in {asked.directory} has no complete data of any step on this machine.")
    bad = sum(bool(each.damages) for each in steps)
    if asked.json:
        how, found = "fast" if asked.fast else "full", [_plain(each) for each in runs]
        output.as_json({"tier": os.path.realpath(asked.directory), "verify": how, "runs": found})
        return int(bad > 0)
    columns = ("step", "branch", "files", "size", "ranks here", "state", "reason")
    for run in runs:
        wrong = [(each, "\n".join(f"{name}: {what}" for name, what in each.damages.items())) for each in run.steps]
        rows = [(*_cells(each, columns[:-1], run, good="valid"), text) for each, text in wrong if each.parts]
        output.table(f"{run.path}: on this machine", columns, rows, verdict="state")
        output.echo()
    how = "Checked manifests and file sizes only" if asked.fast else "Read every block"
    count = f"{len(steps)} step{'' if len(steps) == 1 else 's'}, {f'{bad} not' if bad else 'all'} valid."
    output.echo(f"{how}: {count}", "bold red" if bad else "")
    if bad:
        output.echo("A restore reads corrupt or missing blocks from another machine, or resumes from another step.")
    return int(bad > 0)


def _plain(run: _Run) -> dict[str, Any]:
    newest, copied = run.newest("copied", "written"), run.newest("copied")
    return {
        "run": os.path.basename(run.path),
        "path": run.path,
        "held_by": run.held_by and dataclasses.asdict(run.held_by),
        "newest": newest and newest.path,
        "newest_copied": copied and copied.path,
        "steps": [_entry(each) for each in run.steps],
    }


def _entry(step: _Step) -> dict[str, Any]:
    save = step.readable and step.readable.save
    return {
        "path": step.path,
        "step": step.step,
        "branch": save and save.branch,
        "serial": save and save.serial,
        "time": max((each.time for each in step.parts), default=None),
        "files": sum(len(each.part.files) for each in step.parts if each.part is not None),
        "bytes": step.nbytes,
        "ranks": save and save.world_size,
        "state": step.state,
        "void": step.void,
        "parts": [{"rank": e.rank, "copied": [*e.copied], "received": e.received} for e in step.parts],
        "damages": [{"file": name, "what": what} for name, what in step.damages.items()],
    }


def _cells(step: _Step, columns: Sequence[str], run: _Run, good: str = "") -> list[str]:
    entry = _entry(step)
    texts = {name: "-" if entry.get(name) is None else str(entry[name]) for name in columns}
    texts["size"] = size_text(step.nbytes) if step.parts else "-"
    if entry["time"] is not None:
        texts["age"] = _age(time.time() - entry["time"])
        texts["ranks here"] = _ranks([each.rank for each in step.parts])
        texts["ranks here"] += "" if entry["ranks"] is None else f" of {entry['ranks']}"
    if good and not step.damages:
        texts["state"] = good
    elif step.state == "unfinished":
        texts["state"] = "leftover of a killed run" if run.held_by is None else "being written"
    return [texts[name] for name in columns]


def _more(step: _Step) -> str:
    """Return text for the last column: why a step is void or corrupt, and which machines have copies of its parts."""
    where: dict[str, list[int]] = defaultdict(list)
    for each in step.parts:
        copied = f"copied to {', '.join(each.copied)}" if each.copied else ""
        where[copied or ("from another machine" if each.received else "only here")].append(each.rank)
    texts = [text if len(where) == 1 else f"{_ranks(ranks)}: {text}" for text, ranks in where.items()]
    return "; ".join(filter(None, (step.void, *[f"{name}: {what}" for name, what in step.damages.items()], *texts)))


def _judgement(run: _Run) -> str:
    """Return a sentence on the newest step, and on the newest step that survives a failure of this machine."""
    newest, copied = run.newest("copied", "written"), run.newest("copied")
    if newest is None:
        return "This machine has no complete step that the run can resume from."
    if copied is None:
        return f"No step has peer copies: step {newest.step} does not survive a failure of this machine."
    return f"The newest step is {newest.step}. Step {copied.step} is the newest that survives if this machine fails."


def _ranks(ranks: Sequence[int]) -> str:
    """Return a sorted list of ranks as text, such as ``0-3, 8``."""
    runs = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), key=lambda each: each[1] - each[0])]
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in runs)


def _age(seconds: float) -> str:
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{max(0, seconds) / size:.0f} {unit}"


# -- reading the folders of this machine


def _runs(target: str, content: bool) -> list[_Run]:
    """Return the runs in ``target``, the folder of a tier, a run or a step; an empty list for other folders.

    ``content``: whether to read every file. Raises: ``CheckpointError`` if the folder cannot be listed.
    """
    look = (lambda path: output.progress(f"reading {path}")) if content else None
    path = os.path.realpath(target)
    try:
        if "://" in target or not os.path.isdir(target):
            return []
        if step_of(os.path.basename(path)) is not None and _is_run(os.path.dirname(path)):
            return [_run(os.path.dirname(path), [os.path.basename(path)], look)]
        names = sorted(os.listdir(path))
        if _is_run(path):
            return [_run(path, names, look)]
        if any(step_of(name) is not None for name in names):  # a checkpoint directory
            return []
        return [_run(each, os.listdir(each), look) for name in names if _is_run(each := f"{path}/{name}")]
    except OSError as error:
        raise CheckpointError(f"cannot list {target}: {error}") from error
    finally:
        output.progress()


def _is_run(path: str) -> bool:
    """Return whether a folder belongs to one run: its name is a run ID, and it contains a run file or a part."""
    if not TOKEN.fullmatch(os.path.basename(path)) or not os.path.isdir(path):
        return False
    names = os.listdir(path)
    steps = [f"{path}/{name}" for name in names if step_of(name) is not None and os.path.isdir(f"{path}/{name}")]
    return NOTE in names or any(map(names_part, (name for step in steps for name in os.listdir(step))))


def _run(path: str, names: list[str], look: Callable[[str], object] | None) -> _Run:
    lineage = lineage_of([read_or_skip(f"{path}/{NOTE}")], os.path.basename(path))
    boot = read_or_skip(f"{path}/{BOOT}").decode(errors="replace")
    places = [f"{path}/{name}" for name in names if step_of(name) is not None and os.path.isdir(f"{path}/{name}")]
    steps = [_step(place, lineage, boot, look) for place in places]
    there = [each for each in steps if os.path.isdir(each.path)]
    return _Run(path, sorted(there, key=lambda each: each.order, reverse=True), holder(path))


def _step(path: str, lineage: Lineage | None, boot: str, look: Callable[[str], object] | None) -> _Step:
    if look is not None:
        look(path)
    found = []
    with contextlib.suppress(FileNotFoundError):
        found = [_part(path, name, look is not None) for name in os.listdir(path) if names_part(name)]
    step = _Step(path, sorted((each for each in found if each), key=lambda each: each.rank), "")
    if boot and boot != boot_id():
        return step._replace(void="saved before a reboot")
    if step.readable is not None and lineage is not None and not lineage.is_valid(step.readable.save):
        return step._replace(void=ROLLED_BACK)
    return step


def _part(folder: str, name: str, content: bool) -> _Part | None:
    """Check a part; with ``content``, read all its blocks. Return ``None`` if the part is deleted meanwhile."""
    part, rank, damages, changed = None, int(name.split("-")[1].split(".")[0]), {}, 0.0
    try:
        changed = os.stat(f"{folder}/{name}").st_mtime
        part = read_part(folder, name)
    except OSError as error:
        damages[name] = damage_of(error)
    except (ValueError, TypeError) as error:
        damages[name] = f"corrupt: {error}"
    for file, known in {} if part is None else part.files.items():
        if what := _damage(f"{folder}/{file}", known, content):
            damages[file] = what
    if damages and not os.path.exists(f"{folder}/{name}"):
        return None
    return _Part(part, rank, *notes_of_part(folder, name), changed, damages)


def _damage(path: str, known: PartFile, content: bool) -> str:
    """Return why a file is corrupt or inaccessible; empty if the file matches its checksums."""
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode):
            return "not a regular file"
        if wrong := difference(FileDigest(known.nbytes, 0), about.st_size):
            return wrong
        with open(path, "rb", opener=open_regular) as file:
            for number, expected in enumerate(known.blocks) if content else ():
                if (found := crc32(file.read(len(known.block(number))))) != expected:
                    return f"CRC-32 mismatch in block {number}: expected {expected:08x}, got {found:08x}"
    except OSError as error:
        return damage_of(error)
    return ""
