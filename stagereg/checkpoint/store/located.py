"""Finds the checkpoints at a path or URL from the user: a checkpoint directory, or a single checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf

from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, plain_name, step_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.foreign import expect_no_other_format
from stagereg.checkpoint.store.open_store import open_parent_store, open_store
from stagereg.errors import CheckpointError, CorruptCheckpointError, listed


@dataclass(frozen=True)
class Located:
    """The checked checkpoints of a directory, highest step first. ``one``: the user gave the path of one checkpoint."""

    store: CheckpointStore
    conditions: Sequence[VerificationResult]
    one: bool


def located(target: str, empty: bool = False, every_name: bool = False) -> Located:
    """Return the checkpoints at a path or URL. ``empty``: a directory with only unfinished saves is accepted.

    Checkpoints of plain torch are included if their directories are named ``step-N``, or if ``every_name`` is set.
    Raises ``CheckpointError`` if no checkpoint is found, or the path cannot be accessed; ``ConfigError`` for a bad URL.
    """
    try:
        name = target.rstrip("/").rpartition("/")[2]
        if name != LATEST and step_of(name) is None:
            store = open_store(target)
            every = sorted([*conditions(store), *store.of_torch(every_name)], key=_falling)
            if every or (empty and store.leftovers()):
                return Located(store, every, one=False)
        store = open_parent_store(target)
        one = store.look(target)
        lost = one.damages.get(MANIFEST) == "missing"
        if one.manifest is not None or not lost or any(each.name == one.name for each in conditions(store)):
            return Located(store, [one], one=True)
    except OSError as error:
        raise CheckpointError(f"Cannot access {target}: {error}") from error
    expect_no_other_format(target)
    raise CheckpointError(nothing_in(target))


def nothing_in(target: str) -> str:
    """Return the error message for a path or URL that contains no checkpoint."""
    store = open_store(target)
    others = [] if store.backend.remote else [each.name for each in store.of_torch(every=True)]
    if others:
        there = listed(sorted(others))
        return f"No checkpoint in {target} is named step-N. Give one of the directories there: {there}."
    return f"There is no checkpoint in {target}. Give a directory with checkpoints."


def newest_first(conditions: Sequence[VerificationResult]) -> list[VerificationResult]:
    """Sort checkpoints by commit order, newest first. Checkpoints without a manifest may be newer, and come first."""
    own = [each for each in conditions if not each.writer]
    own.sort(key=lambda each: -each.manifest.serial if each.manifest else -inf)
    return with_torchs(own, [each for each in conditions if each.writer])


def with_torchs(own: Sequence[VerificationResult], of_torch: Sequence[VerificationResult]) -> list[VerificationResult]:
    """Insert plain torch's checkpoints into the newest-first list ``own``, ordered by time of writing, then step."""

    def age(each: VerificationResult) -> tuple[float, float]:
        return (inf, inf) if each.manifest is None else (each.manifest.time, each.manifest.step)

    found = [*own]
    for each in sorted(of_torch, key=age):
        at = next((at for at, other in enumerate(found) if age(other) <= age(each)), len(found))
        found.insert(at, each)
    return found


def conditions(store: CheckpointStore) -> list[VerificationResult]:
    """Check the manifest and file sizes of each checkpoint in a store; return the results, highest step first."""
    complete, damaged = store.checkpoints()
    return sorted([*(VerificationResult(one.path, one.manifest) for one in complete), *damaged], key=_falling)


def _falling(each: VerificationResult) -> int:
    return 1 if each.step is None else -each.step


def newest(target: str, verify: bool, reading: ExitStack) -> tuple[VerificationResult, list[VerificationResult]]:
    """Return the newest valid checkpoint, and all invalid checkpoints that are newer. ``verify``: compare checksums.

    No run deletes the checkpoint until the exit stack ``reading`` closes. Raises ``CheckpointError`` if none is valid.
    """
    found = located(target)
    passed: list[VerificationResult] = []
    for each in newest_first(found.conditions):
        condition = each
        if not each.damages:
            reading.enter_context(found.store.readers.read_lease(each.path))
            condition = found.store.look(each.path, content=verify)
        if condition.checkpoint is not None:
            return condition, passed
        reading.close()
        passed.append(condition)
    if {each.path for each in located(target).conditions} - {each.path for each in found.conditions}:
        return newest(target, verify, reading)  # a run has committed new checkpoints meanwhile
    every = "\n".join(f"{each.path}: {each}" for each in passed)
    raise CorruptCheckpointError(f"There is no valid checkpoint in {target}:\n{every}")


def path_of(store: CheckpointStore, checkpoint: Checkpoint) -> str | None:
    """Return the current path of a checkpoint, which a run may have renamed, or ``None`` if it was deleted."""
    folder, _, name = checkpoint.path.rpartition("/")
    for path in (checkpoint.path, f"{folder}/{plain_name(name)}"):
        found = store.look(path)
        if found.manifest == checkpoint.manifest and not found.damages:
            return path
    return None
