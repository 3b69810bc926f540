"""Where in a checkpoint the state of an object lies, also when other ranks, or another number of them, wrote it.

Nearly everything has one entry under its own name, from which every rank reads what it needs: of a ``DTensor`` its own
shard, however many ranks it was sharded over. A ``ZeroRedundancyOptimizer`` has an entry per rank that saved it
(:mod:`stagereg.checkpoint.zero_shards`); a rank reads of each the state of those parameters that are its own now. The
same numbers make ZeRO and the optimizer class inside it interchangeable: one restores what the other saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import stagereg.checkpoint.entries as entries
import stagereg.checkpoint.torchfiles as torchfiles
import stagereg.checkpoint.zero_shards as zero_shards
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, nearest

__all__ = ["listed", "parts", "read", "read_part"]

_SHOWN = 20


def read(
    storage: Storage, path: str, state: Mapping[str, Any], saved_size: int, rank: int, size: int
) -> dict[str, Any]:
    """Read what the objects and values of ``state`` take, and change none of them. Each rank on its own.

    Args:
        storage: the one that wrote the checkpoint.
        path: of the checkpoint, a path or a URL.
        state: as given to ``Checkpointer.restore``.
        saved_size: how many ranks wrote it.
        rank: this rank.
        size: how many ranks there are now.

    Returns:
        For each name what :func:`.entries.assign` takes; under :func:`.entries.rng_name` this rank's random number
        generators, if as many ranks wrote it.

    Raises:
        CheckpointError: there is nothing for a name, or it is of another kind.
    """
    there = torchfiles.entry_names(storage, path)
    same_ranks = saved_size == size
    shards = {name: _shards(name, there, saved_size) for name in state}
    lying = {name: _lying(name, value, shards[name], there, rank, same_ranks) for name, value in state.items()}
    own = [entries.rng_name(rank)] if same_ranks else []
    shapes = torchfiles.shapes(storage, path, [*own, *(entry for found in lying.values() for entry in found)])
    for name, value in state.items():
        if isinstance(value, ZeroRedundancyOptimizer) and not _suffices(value, [shapes[e] for e in lying[name]]):
            lying[name] = shards[name]
            shapes |= torchfiles.shapes(storage, path, lying[name])
    taken = {name: _taken(name, value, {e: shapes[e] for e in lying[name]}) for name, value in state.items()}
    wanted = {entry: shapes[entry] for entry in own}
    live: dict[str, DTensor] = {}
    for name, found in taken.items():
        wanted |= found
        for entry in found:
            live |= entries.sharded(entry, state[name])
    values = torchfiles.read(storage, path, wanted, live)
    joined = {name: _joined(state[name], name, {e: values[e] for e in found}) for name, found in taken.items()}
    return {**joined, **{entry: values[entry] for entry in own}}


def parts(storage: Storage, path: str, saved_size: int) -> dict[str, dict[str, Any]]:
    """Return what there is to be read of a checkpoint, by the names that the caller's state had.

    Returns:
        For each name the entries it lies in, with the skeletons of what to take of them, for :func:`read_part`: one
        entry, or those of a ``ZeroRedundancyOptimizer``'s shards.
    """
    there = [name for name in torchfiles.entry_names(storage, path) if name.split(".")[0] != entries.RESERVED]
    shapes = torchfiles.shapes(storage, path, there)
    found = {name: {name: shape} for name, shape in shapes.items() if not zero_shards.is_shard(shape)}
    sharded = {name.rpartition(".rank")[0] for name in shapes.keys() - found.keys()}
    for name in sharded:
        shards = {e: shapes[e] for e in _shards(name, set(there), saved_size) if zero_shards.is_shard(shapes[e])}
        found[name], _ = zero_shards.dealt(shards, {number for shape in shards.values() for number in shape["state"]})
    return dict(sorted(found.items()))


def read_part(storage: Storage, path: str, name: str, found: Mapping[str, Any]) -> Any:
    """Read all of one name, whole, in this process alone: the shards of an optimizer as the optimizer's state dict.

    Args:
        storage: the one that wrote the checkpoint.
        path: of the checkpoint, a path or a URL.
        name: as the caller's state had it.
        found: what :func:`parts` has of it.
    """
    return _joined(None, name, torchfiles.read(storage, path, found, {}))


def listed(names: Sequence[str]) -> str:
    """Return the names of a checkpoint's entries for a message, of many the first: there may be some of each rank."""
    more = len(names) - _SHOWN
    # The names may come from elsewhere: no longer than a line, and no control sequence of a terminal.
    shown = [f"{name:.100}" if name.isprintable() else f"{name!r:.100}" for name in names[:_SHOWN]]
    shown += [f"and {more} more"] if more > 0 else []
    return ", ".join(shown) or "an empty state"


def _shards(name: str, there: set[str], saved_size: int) -> list[str]:
    """The entries that ranks have of their own under a name, in the order of the ranks."""
    # Each rank has an entry at least, so a manifest that claims more ranks than that is no reason to count them all.
    most = min(saved_size, len(there))
    return [entry for rank in range(most) if (entry := entries.rank_name(name, rank)) in there]


def _lying(name: str, value: Any, shards: list[str], there: set[str], rank: int, same_ranks: bool) -> list[str]:
    """The entries to look into for ``value``. Raises: ``CheckpointError`` if there is none."""
    sharded = isinstance(value, ZeroRedundancyOptimizer)
    if sharded and same_ranks and entries.rank_name(name, rank) in shards:
        return [entries.rank_name(name, rank)]
    if shards and (sharded or (isinstance(value, Optimizer) and name not in there)):
        return shards
    if name in there:
        return [name]
    if shards:
        raise CheckpointError(
            f"{name!r} was saved by each rank for itself. Ask for {shards[0]!r} and so on; or, if it is of a "
            "ZeroRedundancyOptimizer, restore it into an optimizer."
        )
    others = sorted(other for other in there if not other.startswith(f"{entries.RESERVED}."))
    raise CheckpointError(f"There is no {name!r} in it, only {listed(others)}.{nearest(name, others)}")


def _suffices(optimizer: ZeroRedundancyOptimizer, shapes: list[Any]) -> bool:
    """Whether all that this rank owns is in what it looked into, as it is unless the parameters are dealt otherwise."""
    if not zero_shards.is_shard(shapes[0]):
        return True
    owned = set().union(*(shape["state"] for shape in shapes))
    return owned.issuperset(zero_shards.numbers(optimizer))


def _taken(name: str, value: Any, shapes: dict[str, Any]) -> dict[str, Any]:
    """What to read of each entry, as a skeleton; of a parameter that is in several, the lowest rank's."""
    sharded = isinstance(value, ZeroRedundancyOptimizer)
    if not sharded and (name in shapes or not isinstance(value, Optimizer)):
        return shapes
    own = zero_shards.numbers(value) if sharded else range(sum(len(group["params"]) for group in value.param_groups))
    if name in shapes:
        if not zero_shards.is_whole(shapes[name]):
            raise CheckpointError(f"{name!r} is a ZeroRedundancyOptimizer, and what was saved is no optimizer's state.")
        return {name: zero_shards.cut(shapes[name], own)}
    if not all(map(zero_shards.is_shard, shapes.values())):
        if sharded and len(shapes) == 1:
            return shapes
        raise CheckpointError(
            f"{name!r} was saved as each rank's own part by an older version, which as many ranks can restore into a "
            "ZeroRedundancyOptimizer; save it again from there."
        )
    taken, missing = zero_shards.dealt(shapes, own)
    if missing:
        raise CheckpointError(
            f"{name!r}: of {len(own)} parameters {len(missing)} are in no rank's part, the first being number "
            f"{min(missing)}; was it an optimizer of as many parameters?"
        )
    return taken


def _joined(value: Any, name: str, found: dict[str, Any]) -> Any:
    """What was read of some entries as the one that the object takes."""
    if name in found:
        return found[name]
    parts = list(found.values())
    return zero_shards.merged(parts) if zero_shards.is_shard(parts[0]) else zero_shards.whole(value, parts[0])
