"""Where in a checkpoint the state of an object lies, also when other ranks, or another number of them, wrote it.

Nearly everything has one entry under its own name, from which every rank reads what it needs: of a ``DTensor`` its own
shard, however many ranks it was sharded over. A ``ZeroRedundancyOptimizer`` has an entry per rank that saved it
(:mod:`stagereg.checkpoint.zero_shards`); a rank reads of each the state of those parameters that are its own now. The
same numbers make ZeRO and the optimizer class inside it interchangeable: one restores what the other saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import stagereg.checkpoint.entries as entries
import stagereg.checkpoint.zero_shards as zero_shards
from stagereg.checkpoint.reading import CheckpointFiles
from stagereg.errors import CheckpointError, nearest

__all__ = ["find", "listed", "parts"]

_SHOWN = 20


def find(files: CheckpointFiles, state: Mapping[str, Any], saved_size: int, rank: int, size: int) -> dict[str, Any]:
    """Return the structures of what the objects and values of ``state`` take. Each rank on its own.

    Args:
        files: of the checkpoint.
        state: as given to ``Checkpointer.restore``.
        saved_size: how many ranks wrote it.
        rank: this rank.
        size: how many ranks there are now.

    Returns:
        For each name what :func:`.entries.assign` takes, with leaves that are yet to be read; under
        :func:`.entries.rng_name` this rank's random number generators, if as many ranks wrote it.

    Raises:
        CheckpointError: there is nothing for a name, or it is of another kind.
    """
    there = files.index.state.keys()
    found = {name: _found(files, name, value, there, saved_size, rank, size) for name, value in state.items()}
    own = entries.rng_name(rank)
    return {**found, own: files.structure(own)} if saved_size == size else found


def parts(files: CheckpointFiles, saved_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return the structures of all there is, by the names that the caller's state had.

    The shards of a ``ZeroRedundancyOptimizer`` are the state dict of the optimizer inside; their names come second.
    """
    names = [name for name in files.index.state if name.split(".")[0] != entries.RESERVED]
    found = {name: files.structure(name) for name in names}
    sharded = {name.rpartition(".rank")[0] for name, structure in found.items() if zero_shards.is_shard(structure)}
    for name in sharded:
        shards = {e: found.pop(e) for e in _shards(name, found.keys(), saved_size) if zero_shards.is_shard(found[e])}
        numbers = {number for shard in shards.values() for number in shard["state"]}
        found[name] = zero_shards.merged(zero_shards.dealt(shards, numbers)[0])
    return dict(sorted(found.items())), sorted(sharded)


def listed(names: Sequence[str]) -> str:
    """Return the names of a checkpoint's entries for a message, of many the first: there may be some of each rank."""
    more = len(names) - _SHOWN
    # The names may come from elsewhere: no longer than a line, and no control sequence of a terminal.
    shown = [f"{name:.100}" if name.isprintable() else f"{name!r:.100}" for name in names[:_SHOWN]]
    shown += [f"and {more} more"] if more > 0 else []
    return ", ".join(shown) or "an empty state"


def _shards(name: str, there: AbstractSet[str], saved_size: int) -> list[str]:
    """The entries that ranks have of their own under a name, in the order of the ranks."""
    # Each rank has an entry at least, so a manifest that claims more ranks than that is no reason to count them all.
    most = min(saved_size, len(there))
    return [entry for rank in range(most) if (entry := entries.rank_name(name, rank)) in there]


def _found(
    files: CheckpointFiles, name: str, value: Any, there: AbstractSet[str], saved_size: int, rank: int, size: int
) -> Any:
    """Return the structure of one name, also if an optimizer's parameters were dealt to ranks otherwise."""
    sharded = isinstance(value, ZeroRedundancyOptimizer)
    shards = _shards(name, there, saved_size)
    if not shards or not (sharded or (isinstance(value, Optimizer) and name not in there)):
        return _whole(files, name, value, there, shards)
    own = zero_shards.numbers(value) if sharded else range(sum(len(group["params"]) for group in value.param_groups))
    alone = entries.rank_name(name, rank)
    if sharded and saved_size == size and alone in shards:  # as it is unless the parameters are dealt otherwise
        shard = files.structure(alone)
        if zero_shards.is_shard(shard) and shard["state"].keys() >= set(own):
            return zero_shards.merged([zero_shards.cut(shard, own)])
    structures = {shard: files.structure(shard) for shard in shards}
    if not all(map(zero_shards.is_shard, structures.values())):
        raise CheckpointError(f"{name!r} is an optimizer, and what was saved by each rank is no part of one.")
    taken, missing = zero_shards.dealt(structures, own)
    if missing:
        raise CheckpointError(
            f"{name!r}: of {len(own)} parameters {len(missing)} are in no rank's part, the first being number "
            f"{min(missing)}; was it an optimizer of as many parameters?"
        )
    return zero_shards.merged(taken)


def _whole(files: CheckpointFiles, name: str, value: Any, there: AbstractSet[str], shards: list[str]) -> Any:
    """Return the structure of what has one entry. Raises: ``CheckpointError`` if there is none."""
    if name in there:
        structure = files.structure(name)
        if not isinstance(value, ZeroRedundancyOptimizer):
            return structure
        if not zero_shards.is_whole(structure):
            raise CheckpointError(f"{name!r} is a ZeroRedundancyOptimizer, and what was saved is no optimizer's state.")
        return zero_shards.cut(structure, zero_shards.numbers(value))
    if shards:
        raise CheckpointError(
            f"{name!r} was saved by each rank for itself. Ask for {shards[0]!r} and so on; or, if it is of a "
            "ZeroRedundancyOptimizer, restore it into an optimizer."
        )
    others = sorted(other for other in there if not other.startswith(f"{entries.RESERVED}."))
    raise CheckpointError(f"There is no {name!r} in it, only {listed(others)}.{nearest(name, others)}")
