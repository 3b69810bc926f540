"""Computes the CRC-32 of the values that a rank passes to a storage, for a limited number of bytes.

Only the first save with a storage of another package reads the values back and compares them
(:mod:`stagereg.checkpoint.load.read_back`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from stagereg.base.pages import view_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.wrappers import wraps

MOST_BYTES = 256 << 20  # maximum bytes that a rank checksums, and that rank 0 reads back

Written: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A written item: the name of its entry, and its start and shape in the tensor, which are empty for an object."""
K = TypeVar("K")


def digests_of(items: Iterable[WriteItem], planner: SavePlanner) -> dict[Written, int]:
    """Return the CRC-32 of each item that :func:`bounded` selects, except wrapper tensor subclasses."""
    by_key: dict[Written, WriteItem] = {}
    sizes: dict[Written, int] = {}
    for item in items:
        data = item.tensor_data
        box = ((), ()) if data is None else (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        key = (item.index.fqn, *box)
        by_key[key], sizes[key] = item, 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
    found: dict[Written, int] = {}
    for key in bounded(sizes):
        content = planner.resolve_data(by_key[key])
        if not isinstance(content, torch.Tensor):
            found[key] = crc32(content.getbuffer())
        elif not wraps(content):
            found[key] = digest(content)
    return found


def digest(x: torch.Tensor) -> int:
    """Return the CRC-32 of the elements of a tensor in row-major order."""
    x = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return crc32(view_of(x)) if x.nbytes else 0


def bounded(sizes: Mapping[K, int]) -> list[K]:
    """Select keys of at most :data:`MOST_BYTES` in total: the largest one up to half the limit, then the smallest."""
    keys = sorted(sizes, key=sizes.__getitem__)
    large = [key for key in keys if 2 * sizes[key] <= MOST_BYTES][-1:]
    chosen, left = large, MOST_BYTES - sum(sizes[key] for key in large)
    for key in keys:
        left -= sizes[key]
        if left < 0:
            break
        if key not in large:
            chosen.append(key)
    return chosen
