"""``stagereg ls`` and ``stagereg verify`` of a tier: which steps are on this machine, and where else.

The folder is that of the tier (``tier.dir``), of one run in it, or of one step. What is shown is what this machine
knows: it asks no other, and disturbs no run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import stagereg.base.output as output
from stagereg.base.output import size_text
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.local_steps import LocalRun, LocalStep, local_runs

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def list_steps(asked: argparse.Namespace) -> int | None:
    """Print the steps of a tier and return 0; ``None`` if ``asked.directory`` is none."""
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
            output.echo(f"Held by {run.held_by}")
    return 0


def verify_steps(asked: argparse.Namespace) -> int | None:
    """Print what is wrong with the steps of a tier; return 0 if nothing is, else 1; ``None`` as above.

    Raises:
        CheckpointError: it has no step.
    """
    runs = _runs(asked.directory, not asked.fast)
    if not runs:
        return None
    steps = [step for run in runs for step in run.steps if step.parts]
    if not steps:
        raise CheckpointError(f"The tier in {asked.directory} has no complete part of a step on this machine.")
    bad = sum(bool(each.damages) for each in steps)
    if asked.json:
        how = "fast" if asked.fast else "full"
        found = [_plain(each) for each in runs]
        output.as_json({"tier": os.path.realpath(asked.directory), "verify": how, "runs": found})
        return int(bad > 0)
    columns = ("step", "branch", "files", "size", "ranks here", "state", "what is wrong")
    for run in runs:
        wrong = [(each, "\n".join(f"{name}: {what}" for name, what in each.damages.items())) for each in run.steps]
        rows = [(*_cells(each, columns[:-1], run, good="good"), text) for each, text in wrong if each.parts]
        output.table(f"{run.path}: on this machine", columns, rows, verdict="state")
        output.echo()
    how = "By manifests and sizes, no content was read" if asked.fast else "The content of every block was read"
    count = f"{len(steps)} step{'' if len(steps) == 1 else 's'}, {f'{bad} not' if bad else 'all'} good."
    output.echo(f"{how}: {count}", "bold red" if bad else "")
    if bad:
        output.echo("A run takes each block that is not good here from another machine, or goes on from another step.")
    return int(bad > 0)


def _runs(target: str, content: bool) -> list[LocalRun]:
    try:
        return local_runs(target, (lambda path: output.progress(f"reading {path}")) if content else None)
    except OSError as error:
        raise CheckpointError(f"{target} could not be looked at: {error}") from error
    finally:
        output.progress()


def _plain(run: LocalRun) -> dict[str, Any]:
    newest, copied = run.newest, run.newest_copied
    return {
        "run": run.run,
        "path": run.path,
        "held_by": run.held_by and dataclasses.asdict(run.held_by),
        "newest": newest and newest.path,
        "newest_copied": copied and copied.path,
        "steps": [_entry(each) for each in run.steps],
    }


def _entry(step: LocalStep) -> dict[str, Any]:
    save = step.known and step.known.save
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


def _cells(step: LocalStep, columns: Sequence[str], run: LocalRun, good: str = "") -> list[str]:
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
        texts["state"] = "leftover of a dead run" if run.held_by is None else "being written"
    return [texts[name] for name in columns]


def _more(step: LocalStep) -> str:
    """Return why a step is void or what is wrong with it, and where else its parts are."""
    where: dict[str, list[int]] = defaultdict(list)
    for each in step.parts:
        copied = f"copied to {', '.join(each.copied)}" if each.copied else ""
        where[copied or ("from another machine" if each.received else "here alone")].append(each.rank)
    texts = [text if len(where) == 1 else f"{_ranks(ranks)}: {text}" for text, ranks in where.items()]
    wrong = [f"{name}: {what}" for name, what in step.damages.items()]
    return "; ".join(filter(None, (step.void, *wrong, *texts)))


def _judgement(run: LocalRun) -> str:
    """Return what the loss of this machine would cost, as far as it knows itself."""
    newest, copied = run.newest, run.newest_copied
    if newest is None:
        return "No step is whole here that the run may go on from."
    if copied is None:
        return f"None is copied: step {newest.step} does not survive the loss of this machine."
    return f"The newest step that survives the loss of this machine is {copied.step}; the newest one is {newest.step}."


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in order as ``0-3, 8``."""
    runs = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), key=lambda each: each[1] - each[0])]
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in runs)


def _age(seconds: float) -> str:
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{max(0, seconds) / size:.0f} {unit}"
