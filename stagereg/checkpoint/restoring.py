"""Choosing a checkpoint to go on from, and loading it into the objects of a run.

Rank 0 lists what there is, so that all ranks speak of the same one; the content of its files is checked against the
manifest, each rank taking a share; then every rank reads what it needs. The ranks agree after each part.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from stagereg.checkpoint import entries, rng, torchfiles
from stagereg.checkpoint.agreement import Agreement
from stagereg.checkpoint.layout import Checkpoint, checkpoints, damage, open_checkpoint
from stagereg.checkpoint.storage.choice import named
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, nearest

__all__ = ["choose", "load"]

_log = logging.getLogger(__name__)


def choose(root: Path, resume: str, ranks: Agreement) -> Checkpoint | None:
    """Return the checkpoint that ``resume`` (``"auto"``, ``"latest"`` or a path) stands for. Collective.

    Raises:
        CheckpointError: on all ranks: what was asked for is not there, incomplete or damaged. ``"auto"`` raises for
            none of these; it warns, goes on to the one before, and returns ``None`` in the end.
    """
    listed = ranks.together(
        f"Nothing to restore from {root}", lambda: _candidates(root, resume) if ranks.rank == 0 else []
    )
    for candidate in listed[0]:
        damaged = _damaged_files(candidate, ranks)
        if not damaged:
            return candidate
        message = f"{candidate.path} is damaged: the content of {', '.join(damaged)} is not what was written."
        if resume != "auto":
            raise CheckpointError(message)
        _log.warning("%s Trying the one before it.", message)
    return None


def load(chosen: Checkpoint, state: MutableMapping[str, Any], own: Storage, ranks: Agreement) -> None:
    """Load ``chosen`` into the objects and values of ``state`` and set the random number generators. Collective.

    It is read through the storage that wrote it: ``own``, the checkpointer's, if it is that one.

    Raises:
        CheckpointError: on all ranks, if any of them could not.
    """
    ranks.together(
        f"{chosen.path} could not be restored",
        lambda: _load(chosen, state, named(chosen.manifest.storage, own), ranks.rank, ranks.size),
    )


def _candidates(root: Path, resume: str) -> list[Checkpoint]:
    if resume not in ("auto", "latest"):
        found = open_checkpoint(Path(resume).expanduser().resolve())
        if isinstance(found, str):
            raise CheckpointError(f"resume={resume} is not a complete checkpoint: {found}.")
        return [found]
    complete, refused = checkpoints(root)
    if refused:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in sorted(refused.items()))
        _log.warning("Passing over what is not a complete checkpoint in %s: %s", root, reasons)
    if resume == "latest" and not complete:
        raise CheckpointError("resume=latest, but there is no complete checkpoint; resume=auto starts from scratch.")
    return complete if resume == "auto" else complete[:1]


def _damaged_files(candidate: Checkpoint, ranks: Agreement) -> list[str]:
    share = sorted(candidate.manifest.files)[ranks.rank :: ranks.size]
    found = ranks.together(f"{candidate.path} could not be read", lambda: damage(candidate, share))
    return [name for names in found for name in names]


def _load(chosen: Checkpoint, state: MutableMapping[str, Any], storage: Storage, rank: int, size: int) -> None:
    there = torchfiles.entry_names(storage, chosen.path)
    names = {name: entries.entry_name(name, value, rank) for name, value in state.items()}
    for name, entry in names.items():
        _check_entry(name, entry, entries.is_sharded(state[name]), there, chosen.manifest.world_size, size)
    templates = {entry: entries.current(state[name]) for name, entry in names.items()}
    generators = entries.rng_name(rank)
    same_ranks = chosen.manifest.world_size == size
    loaded = torchfiles.read(storage, chosen.path, {**templates, **({generators: None} if same_ranks else {})})
    for name, entry in names.items():
        try:
            entries.assign(state, name, loaded[entry])
        except Exception as error:
            raise CheckpointError(f"{name!r} does not take what was saved under its name: {error}") from error
    if same_ranks:
        rng.restore(loaded[generators])
    elif rank == 0:
        _log.warning("%s is of %d ranks: random numbers start anew.", chosen.path, chosen.manifest.world_size)


def _check_entry(name: str, entry: str, sharded: bool, there: set[str], saved_size: int, size: int) -> None:
    saved_sharded = entries.rank_name(name, 0) in there
    if sharded and saved_sharded and saved_size != size:
        raise CheckpointError(
            f"{name!r} is a ZeroRedundancyOptimizer saved by {saved_size} ranks, each its own shard; "
            f"restore it on {saved_size} ranks, not on {size}."
        )
    if entry in there:
        return
    if saved_sharded or (sharded and name in there):
        how = "each rank's own part (ZeroRedundancyOptimizer)" if saved_sharded else "one whole"
        raise CheckpointError(f"{name!r} was saved as {how}; restore it into the same kind of object.")
    others = sorted(other for other in there if not other.startswith(f"{entries.RESERVED}."))
    raise CheckpointError(f"There is no {name!r} in it, only {', '.join(others)}.{nearest(name, others)}")
