"""``stagereg ls`` and ``stagereg verify``: list the checkpoints of a directory, and verify their checksums.

``ls`` reads manifests and file sizes; ``verify`` and ``ls --verify`` read the content of every file. Neither changes a
checkpoint or disturbs a run. ``ls --leftovers`` deletes the unfinished files of killed runs. ``verify`` exits with code
0 if all checkpoints are valid, 1 if some are corrupt, 2 if there is no checkpoint. Plain torch writes no checksums. For
its checkpoints, both commands compare file names and sizes with ``.metadata``, and print "no checksums". An extension
may have a module ``listing``, which lists the extension's directories, such as a local tier.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import stagereg.base.output as output
from stagereg.base.output import size_text
from stagereg.base.providers import providers
from stagereg.checkpoint.format.damage import InaccessibleFile, VerificationResult
from stagereg.checkpoint.format.manifest import step_of, step_within
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.foreign import TORCH
from stagereg.checkpoint.store.located import Located, conditions, located, newest_first
from stagereg.checkpoint.store.open_store import open_store
from stagereg.commands.arguments import add_command
from stagereg.errors import CheckpointError, listed


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_ = "path or URL of a checkpoint directory (checkpoint.dir) or of one checkpoint, or a local tier (tier.dir)"
    listing = "list the checkpoints in a directory or local tier, and the process that holds its lock"
    parser = add_command(commands, "ls", listing, list_checkpoints)
    parser.add_argument("directory", help=help_)
    more = parser.add_mutually_exclusive_group()
    more.add_argument("--verify", action="store_true", help="also read and verify the content of every file")
    help_leftovers = "delete and list the unfinished files and multipart uploads of killed runs"
    more.add_argument("--leftovers", action="store_true", help=help_leftovers)
    parser = add_command(commands, "verify", "verify the checksums of checkpoints", verify)
    parser.add_argument("directory", help=help_)
    parser.add_argument("--fast", action="store_true", help="check only manifests and file sizes, not the content")


def list_checkpoints(asked: argparse.Namespace) -> int:
    """Print the checkpoints. Return 0, even if some are corrupt."""
    if asked.leftovers:
        return _clear(asked)
    for extension in providers("listing"):
        if (shown := extension.list_steps(asked)) is not None:
            return int(shown)
    found = located(asked.directory, empty=True, every_name=True)
    owner, latest = found.store.backend.holder(), found.store.latest()
    crashes = {path: each for one in providers("crashes") for path, each in one.crashes_in(found.store).items()}
    kept, readers = found.store.retention.kept(), found.store.readers.found()
    entries = []
    for each in _read(found) if asked.verify else found.conditions:
        # Compare manifests, not paths, because the path may contain a symbolic link.
        is_latest = latest is not None and each.manifest == latest.manifest
        passed = "valid" if asked.verify else "not verified"
        stays = [kept[each.name]] if each.name in kept else []
        stays += [f"being read by {lease.owner}" for lease in readers.get(each.name, ()) if not lease.is_over()]
        lacks, dropped = (each.manifest.lacks, each.manifest.dropped) if each.manifest is not None else ("", [])
        inexact = f"not exact: lacks {lacks}" if lacks else ""
        small = f"weights only, without {listed(dropped)}" if dropped else ""
        proofs = [one.verdict_of(found.store, each) for one in providers("notes")]
        why = "; ".join(filter(None, (str(crashes.get(each.path, "")), *proofs, str(each), inexact, small)))
        entries.append(_entry(each, passed) | {"why": why, "latest": is_latest, "kept": "; ".join(stays)})
    for path in [] if found.one else found.store.leftovers():
        unknown = dict.fromkeys(("time", "bytes", "ranks", "lost", "exact", "dropped", "storage"))
        state = "leftover of a killed run" if owner is None else "being written"
        step = step_within(path.rpartition("/")[2])
        entries.append({"path": path, "step": step, **unknown, "state": state, "why": "", "latest": False, "kept": ""})
    if asked.json:
        held = None if owner is None else dataclasses.asdict(owner)
        output.as_json({"root": found.store.root, "held_by": held, "checkpoints": entries})
        return 0
    columns = ("step", "saved", "size", "ranks", "storage", "state")
    more = ["; ".join(filter(None, ("latest" * entry["latest"], entry["kept"], entry["why"]))) for entry in entries]
    rows = [(*_cells(entry, columns), text) for entry, text in zip(entries, more, strict=True)]
    output.table(found.store.root, (*columns, ""), rows, verdict="state")
    if owner is not None:
        output.echo(f"\nLocked by {owner}")
    return 0


def _clear(asked: argparse.Namespace) -> int:
    store = open_store(asked.directory)
    if not store.backend.remote and located(asked.directory, empty=True).one:
        raise CheckpointError(f"{asked.directory} is a checkpoint. Name the checkpoint directory that contains it.")
    with store.lock():
        found = store.sweep()
        stay = store.leftovers()
    deleted = [path for path in found if path not in stay]
    if asked.json:
        output.as_json({"root": store.root, "deleted": deleted, "not_deleted": stay})
        return int(bool(stay))
    count = f"deleted {len(deleted)} leftover{'' if len(deleted) == 1 else 's'} of killed runs"
    output.table(f"{store.root}: {count}", (), [(path,) for path in deleted])
    if stay:
        output.echo(f"\nCannot delete {', '.join(stay)}. Check the permissions.", "bold red")
    return int(bool(stay))


def verify(asked: argparse.Namespace) -> int:
    """Print the state of each checkpoint. Return 0 if all are valid, 1 if any is corrupt or inaccessible."""
    for extension in providers("listing"):
        if (shown := extension.verify_steps(asked)) is not None:
            return int(shown)
    found = located(asked.directory, every_name=True)
    looked = _still_there(found.store, list(found.conditions) if asked.fast else _read(found))
    bad = sum(bool(each.damages) for each in looked)
    unchecked = sum(each.writer == TORCH and not each.damages for each in looked)
    newest = next((each.path for each in newest_first(looked) if not each.damages and each.writer != TORCH), None)
    entries = [_entry(each, "valid") for each in looked]
    if asked.json:
        how = "fast" if asked.fast else "full"
        output.as_json({"root": found.store.root, "verify": how, "checkpoints": entries, "newest_good": newest})
        return int(bad > 0)
    columns = ("step", "files", "size", "state")
    wrong = ["\n".join(f"{name}: {what}" for name, what in each.damages.items()) for each in looked]
    rows = [(*_cells(entry, columns), text) for entry, text in zip(entries, wrong, strict=True)]
    output.table(found.store.root, (*columns, "problem"), rows, verdict="state")
    count = f"{len(looked) - unchecked} checkpoint{'' if len(looked) - unchecked == 1 else 's'}"
    count += f", {f'{bad} not' if bad else 'all'} valid."
    how = "Checked manifests and sizes, not the content" if asked.fast else "Read the content of every file"
    output.echo(f"\n{how}: {count}" if len(looked) > unchecked else "", "bold red" if bad else "")
    if unchecked:
        output.echo(f"{unchecked} saved by plain torch, without checksums: all files exist, content not verified.")
    if bad and not found.one:
        which = "newest checkpoint with valid sizes" if asked.fast else "newest valid checkpoint"
        output.echo("No checkpoint is valid." if newest is None else f"The {which} is {newest}")
    return int(bad > 0)


def _read(found: Located) -> list[VerificationResult]:
    looked = []
    for each in found.conditions:
        output.progress(f"reading {each.path}")
        with found.store.readers.read_lease(each.path):
            looked.append(found.store.look(each.path, content=True))
    output.progress()
    return looked


def _still_there(store: CheckpointStore, looked: list[VerificationResult]) -> list[VerificationResult]:
    """Return the results without those of checkpoints that a training run deleted during the check."""
    there = {each.name for each in conditions(store)}
    left = [e for e in looked if not e.damages or e.name in there or step_of(e.name) is None or e.writer]
    if not left:
        raise CheckpointError(f"{store.root}: a run replaced all checkpoints during the check. Run the command again.")
    return left


def _entry(each: VerificationResult, passed: str) -> dict[str, Any]:
    passed = "no checksums" if each.writer == TORCH else passed
    bad = "corrupt" if any(not isinstance(what, InaccessibleFile) for what in each.damages.values()) else "unclear"
    manifest = each.manifest
    return {
        "path": each.path,
        "step": each.step,
        "time": (manifest and manifest.time) or None,
        "files": manifest and len(manifest.files),
        "bytes": manifest and manifest.nbytes,
        "ranks": (manifest and manifest.world_size) or None,
        "lost": manifest and [int(rank) for rank in manifest.lost],
        "exact": manifest and not manifest.lacks,
        "dropped": manifest and manifest.dropped,
        "storage": manifest and manifest.storage,
        "state": bad if each.damages else passed,
        "damages": [{"file": name, "what": what} for name, what in each.damages.items()],
    }


def _cells(entry: dict[str, Any], columns: Sequence[str]) -> list[str]:
    texts = {name: "-" if value is None else str(value) for name, value in entry.items()}
    if entry["lost"]:
        texts["ranks"] = f"{entry['ranks'] - len(entry['lost'])} of {entry['ranks']}"
    if entry["bytes"] is not None:
        texts["size"] = size_text(entry["bytes"])
    if entry["time"] is not None:
        texts["saved"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
    return [texts.get(name, "-") for name in columns]
