"""Where each tensor of a state dict lies in one block of host memory.

A :class:`Layout` is the plan that is made once and kept while the state dict stays as it is. Tensors that share memory
are put in one *region*, so that tied weights are copied once and stay tied; a view costs the bytes it spans and not its
storage's. A view with holes (a column of a matrix) keeps its strides while the holes cost less than the data or than a
page; beyond that it is packed, and its copy is contiguous.

It reads addresses and shapes and copies nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stagereg.errors import StagingError

__all__ = ["ALIGNMENT", "Layout", "Move", "Piece", "Region", "Signature", "lay_out", "sign"]

ALIGNMENT = 64
"""Bytes: where a region may start in host memory; a cache line, and a multiple of every dtype's size."""

_PAGE = 4096

Signature = list[tuple[object, ...]]
"""What must be equal for a layout to fit again, one tuple a tensor."""


Move = tuple[int, int, int]
"""Offset in host memory, address of the source, bytes."""


@dataclass(slots=True)
class Region:
    """A run of source bytes that is copied as it is.

    Attributes:
        source: index of a tensor whose storage has the bytes.
        begin: first byte, counted from the start of that storage.
        address: where it starts in the source device's memory.
        nbytes: its length in bytes.
        offset: where its copy starts in host memory.
        members: indices of the tensors that lie in it.
    """

    source: int
    begin: int
    address: int
    nbytes: int
    offset: int = 0
    members: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """Where one tensor's copy is: ``stride`` in elements; ``start`` in elements from its region's start.

    ``region`` is None for a packed tensor, which has the host bytes from ``offset`` to itself, and for an empty one.
    """

    region: Region | None
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    offset: int = 0


@dataclass(slots=True)
class Layout:
    """A plan for one state dict.

    Attributes:
        signature: what the plan depends on.
        pieces: where each tensor's copy is, in the order of the tensors.
        moves: the regions that lie in host memory already.
        remote: the regions that lie on an accelerator.
        packed: indices of tensors that are copied element by element.
        nbytes: host memory needed.
    """

    signature: Signature
    pieces: list[Piece]
    moves: list[Move]
    remote: list[Region]
    packed: list[int]
    nbytes: int


def sign(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return what a layout depends on. Costs about a microsecond a tensor."""
    rows: Signature = []
    for x in tensors:
        storage = x.untyped_storage()
        rows.append((x.data_ptr(), x.dtype, x.shape, x.stride(), storage.data_ptr(), storage.nbytes(), x.device))
    return rows


def lay_out(tensors: Sequence[torch.Tensor], signature: Signature) -> Layout:
    """Plan host memory for plain strided tensors.

    Raises:
        StagingError: a tensor reaches beyond its storage, as after its storage was freed; ``path`` is the index.
    """
    pieces: list[Piece] = []
    kept: list[tuple[str, int, int, int]] = []  # device, first byte, byte after the last, tensor
    holed: list[int] = []
    for i, x in enumerate(tensors):
        shape, stride = tuple(x.shape), tuple(x.stride())
        empty = x.numel() == 0
        span = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        pieces.append(Piece(None, 0, shape, stride, span))
        if empty:
            continue
        size = x.element_size()
        address, base, room = _numbers(signature[i])
        if address + span * size > base + room:
            raise StagingError(
                [i], f"it needs {span * size} bytes but its storage holds {room}; was it freed or resized while in use?"
            )
        if span * size > max(2 * x.numel() * size, _PAGE):
            holed.append(i)
        else:
            kept.append((str(x.device), address, address + span * size, i))

    regions = _merge(kept, tensors, signature)
    packed = _adopt(holed, regions, tensors, signature, pieces)
    nbytes = _place(regions, packed, tensors, pieces)
    local = [tensors[region.source].device.type == "cpu" for region in regions]
    moves = [(r.offset, r.address, r.nbytes) for r, here in zip(regions, local, strict=True) if here]
    remote = [r for r, here in zip(regions, local, strict=True) if not here]
    return Layout(signature, pieces, moves, remote, packed, nbytes)


def _numbers(row: tuple[object, ...]) -> tuple[int, int, int]:
    address, base, room = row[0], row[4], row[5]
    assert isinstance(address, int)
    assert isinstance(base, int)
    assert isinstance(room, int)
    return address, base, room


def _merge(
    kept: list[tuple[str, int, int, int]], tensors: Sequence[torch.Tensor], signature: Signature
) -> list[Region]:
    """Join spans that overlap, or that touch within one storage."""
    regions: list[Region] = []
    last: tuple[str, int] | None = None  # device and storage of the newest region
    for device, begin, end, i in sorted(kept):
        _, base, _ = _numbers(signature[i])
        region = regions[-1] if regions else None
        if region is not None and last == (device, base) and begin <= region.address + region.nbytes:
            region.nbytes = max(region.nbytes, end - region.address)
            region.members.append(i)
            continue
        aligned = base + (begin - base) // 16 * 16  # so that a view of a wider dtype starts on its own grid
        regions.append(Region(i, aligned - base, aligned, end - aligned, members=[i]))
        last = (device, base)
    return regions


def _adopt(
    holed: list[int],
    regions: list[Region],
    tensors: Sequence[torch.Tensor],
    signature: Signature,
    pieces: list[Piece],
) -> list[int]:
    """Give a view with holes to the region it lies in, if any; return those that must be packed."""
    starts = [(str(tensors[r.source].device), r.address) for r in regions]
    packed: list[int] = []
    for i in holed:
        address, _, _ = _numbers(signature[i])
        end = address + pieces[i].span * tensors[i].element_size()
        at = bisect_right(starts, (str(tensors[i].device), address)) - 1
        if at >= 0 and starts[at][0] == str(tensors[i].device) and end <= regions[at].address + regions[at].nbytes:
            regions[at].members.append(i)
        else:
            packed.append(i)
    for region in regions:
        for i in region.members:
            address, _, _ = _numbers(signature[i])
            pieces[i].region = region
            pieces[i].start = (address - region.address) // tensors[i].element_size()
    return packed


def _place(regions: list[Region], packed: list[int], tensors: Sequence[torch.Tensor], pieces: list[Piece]) -> int:
    """Hand out host offsets; same packed views get the same one. Return the bytes needed."""
    cursor = 0
    for region in regions:
        region.offset = cursor
        cursor += -(-region.nbytes // ALIGNMENT) * ALIGNMENT
    first: dict[tuple[object, ...], Piece] = {}
    for i in packed:
        x, piece = tensors[i], pieces[i]
        piece.stride = tuple(torch.empty_like(x, device="meta").stride())
        piece.span = x.numel()
        twin = first.setdefault((x.device, x.data_ptr(), x.dtype, x.shape, x.stride()), piece)
        if twin is not piece:
            piece.offset = twin.offset
            continue
        piece.offset = cursor
        cursor += -(-piece.span * x.element_size() // ALIGNMENT) * ALIGNMENT
    return cursor
