"""Plain tensors whose attributes declare shards of a larger tensor: torch 2.14's ``CheckpointableTensor``.

Such a tensor has four attributes: the shape of the larger tensor (``global_shape``), and for each shard its offsets in
the larger tensor (``global_offsets``), its offsets in this tensor (``local_offsets``) and its shape (``local_sizes``).
Elements outside of the shards are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from stagereg.errors import CheckpointError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class LocalPart(NamedTuple):
    """A shard that a tensor declares."""

    start: torch.Size  # offsets of the shard in the larger tensor
    data: torch.Tensor  # the shard, a view of the declaring tensor


def is_split(x: Any) -> bool:
    """Return whether a value is a tensor that declares shards, by having the four attributes."""
    if type(x) in _PLAIN:
        attributes = x.__dict__
        return bool(attributes) and all(name in attributes for name in _NAMES)
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and all(hasattr(x, name) for name in _NAMES)


def shape_of(x: Any) -> torch.Size:
    """Return the shape of a tensor; if it declares shards, the shape of the larger tensor."""
    return torch.Size(x.global_shape) if is_split(x) else x.shape


def layout_of(x: Any) -> tuple[Any, ...]:
    """Return the four attributes as tuples, for comparison."""
    lists = (x.global_offsets, x.local_offsets, x.local_sizes)
    return (tuple(x.global_shape), *(tuple(map(tuple, each)) for each in lists))


def parts_of(x: Any) -> Iterator[LocalPart]:
    """Yield the shards that a tensor declares. Skips empty shards, unless the larger tensor is empty."""
    empty = not torch.Size(x.global_shape).numel()
    for start, at, shape in zip(x.global_offsets, x.local_offsets, x.local_sizes, strict=True):
        data = x.detach()
        for dim, (begin, size) in enumerate(zip(at, shape, strict=True)):
            data = data if size == data.shape[dim] else data.narrow(dim, begin, size)
        if data.numel() or empty:
            yield LocalPart(torch.Size(start), data)


def carry(source: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Copy the four attributes from ``source``, if it has them, to ``copy``, and return ``copy``."""
    if is_split(source):
        for name in _NAMES:
            setattr(copy, name, getattr(source, name))
    return copy


def expect_valid(name: str, x: Any) -> None:
    """Raise ``CheckpointError`` if the attributes of a tensor do not match its shape or each other."""
    try:
        whole, starts, places, shapes = layout_of(x)
        boxes = [(starts, whole), (places, tuple(x.shape))]
        fits = len(starts) == len(places) == len(shapes) and all(
            len(begin) == len(shape) == len(limit)
            and all(b >= 0 and n >= 0 and b + n <= m for b, n, m in zip(begin, shape, limit, strict=True))
            for begins, limit in boxes
            for begin, shape in zip(begins, shapes, strict=True)
        )
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(
            f"{name!r} cannot be saved: its attributes {', '.join(_NAMES)} do not match its shape or each other. Each "
            "shard needs an offset in both tensors and a shape, and must be inside both."
        )
