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
from stagereg.kernel.leaves import why_without_data
from stagereg.kernel.transfer import Batch, Move

__all__ = ["ALIGNMENT", "Layout", "Piece", "Region", "Signature", "plan_layout", "signature"]

ALIGNMENT = 64
"""Bytes: where a region may start in host memory; a cache line, and a multiple of every dtype's size."""

_PAGE = 4096

Signature = list[tuple[object, ...]]
"""What must be equal for a layout to fit again, one tuple a tensor."""


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
    """Where one tensor's copy is.

    Attributes:
        shape, stride: of the copy; ``stride`` in elements.
        span: elements from its first to its last, both included; 0 for an empty tensor, which lies nowhere.
        start: elements before its first in the storage of the copy.
        offset: where that storage starts in host memory; copies that share memory have the same.
        nbytes: bytes of that storage.
        alone: whether the storage is this copy's only and the copy is contiguous, the common case.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    start: int = 0
    offset: int = 0
    nbytes: int = 0
    alone: bool = False


@dataclass(slots=True)
class Layout:
    """A plan for one state dict.

    Attributes:
        signature: what the plan depends on.
        pieces: where each tensor's copy is, in the order of the tensors.
        moves: the regions that lie in host memory already.
        batch: the same, to be made.
        remote: the regions that lie on an accelerator.
        packed: indices of tensors that are copied element by element.
        regions: those in host memory, in the order of ``moves``.
        nbytes: host memory needed.
        spans: offset and bytes of each tensor that lies in host memory as one run and shares it with none.
        alone: dtype, elements and offset of those tensors, in order; None in place of every other tensor.
        unfinished: indices of the tensors that are something else than so many elements in one dimension.
    """

    signature: Signature
    pieces: list[Piece]
    moves: list[Move]
    batch: Batch
    remote: list[Region]
    packed: list[int]
    regions: list[Region]
    nbytes: int
    spans: dict[int, int]
    alone: list[tuple[torch.dtype, int, int] | None]
    unfinished: list[int]


def signature(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return what a layout depends on. Costs about half a microsecond a tensor.

    Raises:
        StagingError: a tensor has no address; ``path`` is its index.
    """
    rows: Signature = []
    try:
        for x in tensors:
            storage = x.untyped_storage()
            rows.append(
                (x.data_ptr(), x.dtype, x.shape, x.stride(), storage.data_ptr(), storage.nbytes(), x.get_device())
            )
    except RuntimeError as error:
        raise StagingError([len(rows)], f"its memory cannot be reached ({error})") from error
    return rows


def plan_layout(tensors: Sequence[torch.Tensor], signature: Signature, margins: tuple[int, int] = (0, 0)) -> Layout:
    """Plan host memory for plain strided tensors.

    Args:
        tensors: on any devices.
        signature: what :func:`signature` says of them.
        margins: bytes to be left free before and after each region.

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
        pieces.append(Piece(shape, stride, span))
        if empty:
            continue
        size = x.element_size()
        address, base, room = _numbers(signature[i])
        if address == 0 or address + span * size > base + room:
            freed = f"it needs {span * size} bytes but its storage holds {room}; was it freed or resized while in use?"
            raise StagingError([i], why_without_data(x) or freed)
        if span * size > max(2 * x.numel() * size, _PAGE):
            holed.append(i)
        else:
            kept.append((str(x.device), address, address + span * size, i))

    regions = _merge(kept, tensors, signature)
    packed = _adopt(holed, regions, tensors, signature, pieces)
    nbytes = _place(regions, packed, tensors, signature, pieces, margins)
    local = [r for r in regions if tensors[r.source].device.type == "cpu"]
    remote = [r for r in regions if tensors[r.source].device.type != "cpu"]
    moves = [(r.offset, r.address, r.nbytes) for r in local]
    spans = {piece.offset: piece.nbytes for piece in pieces if piece.alone}
    alone = [(x.dtype, p.span, p.offset) if p.alone else None for p, x in zip(pieces, tensors, strict=True)]
    unfinished = [i for i, piece in enumerate(pieces) if not piece.alone or len(piece.shape) != 1]
    return Layout(signature, pieces, moves, Batch(moves), remote, packed, local, nbytes, spans, alone, unfinished)


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
    return packed


def _place(
    regions: list[Region],
    packed: list[int],
    tensors: Sequence[torch.Tensor],
    signature: Signature,
    pieces: list[Piece],
    margins: tuple[int, int],
) -> int:
    """Hand out host offsets; same packed views get the same one. Return the bytes needed."""
    before, after = _aligned(margins[0]), margins[1]
    cursor = 0
    for region in regions:
        region.offset = cursor + before
        cursor = _aligned(region.offset + region.nbytes + after)
        for i in region.members:
            piece, size = pieces[i], tensors[i].element_size()
            address, _, _ = _numbers(signature[i])
            piece.start, piece.offset, piece.nbytes = (address - region.address) // size, region.offset, region.nbytes
            if len(region.members) == 1:  # its storage need not have what alignment has added in front
                piece.start, piece.offset, piece.nbytes = 0, region.offset + piece.start * size, piece.span * size
                piece.alone = piece.stride == _row_major(piece.shape)
    first: dict[tuple[object, ...], int] = {}
    for i in packed:
        x, piece = tensors[i], pieces[i]
        piece.stride = tuple(torch.empty_like(x, device="meta").stride())
        piece.span = x.numel()
        piece.nbytes = piece.span * x.element_size()
        piece.offset = first.setdefault((x.device, x.data_ptr(), x.dtype, x.shape, x.stride()), cursor)
        if piece.offset == cursor:
            cursor += _aligned(piece.nbytes)
    return cursor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= n
    return tuple(reversed(stride))
