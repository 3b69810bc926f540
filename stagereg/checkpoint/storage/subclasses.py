"""Reads tensors that wrap other tensors (:mod:`stagereg.checkpoint.format.wrappers`) bit for bit.

A rank's shard of such a tensor is one archive, which a rank with the same shard reads directly. If the sharding
differs, the shards are copied into a copy of the live tensor, provided that the subclass supports writes to slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

import stagereg.checkpoint.format.pickled as pickled
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.index import SUBCLASS, Chunk, overlap
from stagereg.checkpoint.format.wrappers import cloned, same_bits, wraps
from stagereg.errors import CheckpointError, reason


class Whole(NamedTuple):
    """A range of a file that must be read as a whole, and the function that receives its bytes."""

    file: str
    offset: int
    length: int
    take: Callable[[bytearray], None]


def wholes_of(leaf: Leaf) -> list[Whole] | None:
    """Return the file ranges to read for a leaf; ``None`` if this rank's shard does not wrap other tensors.

    Raises: ``CheckpointError`` if the tensor is sharded differently here, and its shards cannot be merged.
    """
    if not leaf.stored.is_subclass:
        return None
    start, shape = _wanted(leaf)
    parts = [chunk for chunk in leaf.stored.chunks if overlap([(chunk.start, chunk.shape), (start, shape)])]
    if not parts and isinstance(leaf.live, DTensor) and wraps(leaf.live):  # this rank has no elements of the tensor
        leaf.value = dtensor_like(leaf.live, cloned(leaf.live._local_tensor))
        return []
    own = [chunk for chunk in parts if (chunk.start, chunk.shape) == (start, shape)]
    if not parts or (own and own[0].layout != SUBCLASS):
        return None
    if own:
        file, offset, length, *_ = own[0]
        return [Whole(file, offset, length, partial(_take, leaf, own[0]))]
    return _wholes_of_parts(leaf, start, parts)


def dtensor_like(live: DTensor, local: torch.Tensor) -> DTensor:
    """Return a ``DTensor`` sharded like ``live``, with ``local`` as this rank's shard."""
    mesh, places, shape, stride = live.device_mesh, live.placements, live.shape, live.stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)


def _wanted(leaf: Leaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the start of this rank's shard in the whole tensor, and its shape."""
    if isinstance(leaf.live, DTensor) and leaf.live.shape == leaf.stored.shape:
        [chunk] = leaf.live.__create_chunk_list__()
        return tuple(chunk.offsets), tuple(chunk.sizes)
    return (0,) * len(leaf.stored.shape), tuple(leaf.stored.shape)


def _take(leaf: Leaf, chunk: Chunk, data: bytearray) -> None:
    leaf.value = load_part(leaf.name, chunk, leaf.stored.dtype, data)
    if isinstance(leaf.live, DTensor) and leaf.live.shape == leaf.stored.shape:
        try:
            leaf.value = dtensor_like(leaf.live, leaf.value)
        except Exception as error:  # torch calls a view method of the subclass
            raise CheckpointError(f"{leaf.name!r:.100} cannot be wrapped in a DTensor: {reason(error)}") from error


def load_part(name: str, chunk: Chunk, dtype: torch.dtype, data: bytearray) -> torch.Tensor:
    """Return the tensor in the archive of a chunk. Raises: ``CheckpointError`` if it does not match the index."""
    part = pickled.load(name, data)
    if not isinstance(part, torch.Tensor) or part.shape != chunk.shape or part.dtype != dtype:
        raise CheckpointError(f"{name!r:.100} has another shape or dtype in its file than in the index.")
    return part


def _wholes_of_parts(leaf: Leaf, start: Sequence[int], parts: Sequence[Chunk]) -> list[Whole]:
    live = leaf.live
    local = live._local_tensor if isinstance(live, DTensor) else live
    refusal = (
        f"{leaf.name!r:.100} is a tensor subclass that was saved in {len(leaf.stored.chunks)} shards and is sharded "
        "differently here. Restore it at the same world size with the same sharding"
    )
    if local is None or not wraps(local) or any(chunk.layout != SUBCLASS for chunk in parts):
        raise CheckpointError(f"{refusal}.")
    try:
        copy = cloned(local)
        with torch.no_grad():
            targets = [_common(copy, start, chunk.start, chunk.shape) for chunk in parts]
            for target in targets:
                target.copy_(target)
    except Exception as error:
        raise CheckpointError(f"{refusal}: its shards cannot be written ({reason(error)}).") from error
    leaf.value = dtensor_like(live, copy) if isinstance(live, DTensor) else copy
    copied: list[tuple[Chunk, torch.Tensor]] = []

    def take(chunk: Chunk, target: torch.Tensor, data: bytearray) -> None:
        try:
            with torch.no_grad():
                part = load_part(leaf.name, chunk, leaf.stored.dtype, data)
                source = _common(part, chunk.start, start, local.shape)
                target.copy_(source)
                copied.append((chunk, source))
                # Slices may be copies, and shards may share an inner tensor, such as one scale for all shards.
                pairs = ((_common(copy, start, each.start, each.shape), own) for each, own in copied)
                same = len(copied) < len(parts) or all(same_bits(*pair) for pair in pairs)
        except Exception as error:
            raise CheckpointError(f"{refusal}: its shards cannot be copied ({reason(error)}).") from error
        if not same:
            raise CheckpointError(f"{refusal}: the copies of its shards differ from the saved shards.")

    each = zip(parts, targets, strict=True)
    return [Whole(chunk.file, chunk.offset, chunk.length, partial(take, chunk, to)) for chunk, to in each]


def _common(x: torch.Tensor, start: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the overlap of ``x``, a shard at ``start``, with a shard of ``shape`` at ``other``, as a view of ``x``."""
    for dim, (a, b, m) in enumerate(zip(start, other, shape, strict=True)):
        low, high = max(a, b), min(a + x.shape[dim], b + m)
        if high - low < x.shape[dim]:
            x = x.narrow(dim, low - a, high - low)
    return x
