"""The position of each tensor of a state dict in one block of host memory.

A :class:`Layout` is planned once, and reused while the state dict does not change. Tensors that share memory are in one
*region*, which is copied once, so that tied weights remain tied. A view costs the bytes between its first and its last
element, not its whole storage. A view with gaps (for example a column of a matrix) keeps its strides if the gaps are
smaller than the data or a page. Otherwise the view is *packed*: its copy is contiguous.

Planning reads addresses and shapes, and copies nothing. :func:`tensors_over` creates the tensors of the copy.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagereg.base.many_tensors import Description, span_of
from stagereg.errors import StagingError
from stagereg.kernel.state_dict import why_without_data
from stagereg.kernel.transfer import Batch

_ALIGNMENT = 64  # alignment of regions in bytes: a cache line, which is a multiple of the size of every dtype
_PAGE = 4096

Signature = list[tuple[int, torch.dtype, torch.Size, tuple[int, ...], int, int, int]]
"""The properties that must be equal for a layout to be reused. Per tensor: address, dtype, shape, stride, address and
bytes of the storage, device."""

_Run = tuple[int, int, int, int]  # device index, first address, address after the last byte, tensor index


@dataclass(slots=True)
class Region:
    """A range of source bytes that is copied as a whole."""

    source: int  # index of one tensor whose storage contains the bytes
    address: int  # start in the source device's memory
    nbytes: int
    members: list[int]  # indices of the tensors in the region
    offset: int = 0  # offset of the copy in host memory


@dataclass(slots=True)
class Piece:
    """The position of the copy of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    span: int  # number of elements from the first to the last in memory; 0 for an empty tensor
    start: int = 0  # index of the first element in the storage of the copy
    offset: int = 0  # offset of the storage in host memory; equal for copies that share memory
    nbytes: int = 0  # size of the storage


@dataclass(slots=True)
class Layout:
    """The plan for one state dict. Refers to tensors by index."""

    signature: Signature  # properties of the tensors for which the plan was made
    pieces: list[Piece]  # position of each tensor's copy
    regions: list[Region]  # regions whose source is in host memory
    batch: Batch  # the copies of ``regions``
    remote: list[Region]  # regions whose source is on an accelerator
    packed: list[int]  # tensors in host memory that are copied element by element
    remote_packed: list[int]  # tensors on an accelerator that are copied element by element
    nbytes: int  # required host memory
    description: Description
    offsets: array[int]  # offset of each tensor's copy that has its own storage; otherwise -1
    others: list[int]  # tensors whose copies share memory, are packed or empty


def signature(tensors: Sequence[torch.Tensor]) -> Signature:
    """Return the properties of tensors on which a layout depends. Takes about 0.5 microseconds per tensor."""
    rows: Signature = []
    try:
        for x in tensors:
            storage = x.untyped_storage()
            row = (x.data_ptr(), x.dtype, x.shape, x.stride(), storage.data_ptr(), storage.nbytes(), x.get_device())
            rows.append(row)
    except RuntimeError as error:
        raise StagingError([len(rows)], f"its memory is inaccessible ({error})") from error
    return rows


def plan_layout(tensors: Sequence[torch.Tensor], rows: Signature) -> Layout:
    """Plan host memory for plain strided tensors.

    Raises:
        StagingError: a tensor extends beyond its storage, for example after the storage was freed. ``path`` is its
            index.
    """
    pieces: list[Piece] = []
    runs: list[_Run] = []
    holed: list[_Run] = []
    for i, (x, (address, _, shape, stride, base, available, device)) in enumerate(zip(tensors, rows, strict=True)):
        span = span_of(x)
        pieces.append(Piece(shape, stride, span))
        if not span:
            continue
        nbytes = span * x.element_size()
        if address == 0 or address + nbytes > base + available:
            freed = f"it needs {nbytes} bytes but its storage has {available}. Was the storage freed or resized in use?"
            raise StagingError([i], why_without_data(x) or freed)
        (holed if nbytes > max(2 * x.nbytes, _PAGE) else runs).append((device, address, address + nbytes, i))

    regions = _merge(runs, rows)
    packed = _adopt(holed, regions, rows)
    nbytes, offsets = _assign(regions, packed, tensors, rows, pieces)
    local = [r for r in regions if tensors[r.source].is_cpu]
    remote = [r for r in regions if not tensors[r.source].is_cpu]
    packs = [i for i in packed if tensors[i].is_cpu], [i for i in packed if not tensors[i].is_cpu]
    batch = Batch([(r.offset, r.address, r.nbytes) for r in local])
    others = [i for i, offset in enumerate(offsets) if offset < 0]
    return Layout(rows, pieces, local, batch, remote, *packs, nbytes, Description([*tensors]), offsets, others)


def _merge(runs: list[_Run], rows: Signature) -> list[Region]:
    regions: list[Region] = []
    last: tuple[int, int] | None = None  # device and storage address of the last region
    for device, begin, end, i in sorted(runs):
        base = rows[i][4]
        if last == (device, base) and begin <= regions[-1].address + regions[-1].nbytes:
            regions[-1].nbytes = max(regions[-1].nbytes, end - regions[-1].address)
            regions[-1].members.append(i)
            continue
        aligned = base + (begin - base) // 16 * 16  # so that views with wider dtypes are aligned
        regions.append(Region(i, aligned, end - aligned, [i]))
        last = (device, base)
    return regions


def _adopt(holed: list[_Run], regions: list[Region], rows: Signature) -> list[int]:
    """Add each view with gaps to the region that contains it, if there is one. Return the other views, to be packed."""
    starts = [(rows[region.source][6], region.address) for region in regions]
    packed: list[int] = []
    for device, begin, end, i in holed:
        at = bisect_right(starts, (device, begin)) - 1
        if at >= 0 and starts[at][0] == device and end <= regions[at].address + regions[at].nbytes:
            regions[at].members.append(i)
        else:
            packed.append(i)
    return packed


def _assign(
    regions: list[Region], packed: list[int], tensors: Sequence[torch.Tensor], rows: Signature, pieces: list[Piece]
) -> tuple[int, array[int]]:
    offsets = array("q", [-1]) * len(pieces)
    cursor = 0
    for region in regions:
        region.offset = cursor
        cursor += _aligned(region.nbytes)
        for i in region.members:
            piece, size = pieces[i], tensors[i].element_size()
            start = (rows[i][0] - region.address) // size
            piece.start, piece.offset, piece.nbytes = start, region.offset, region.nbytes
            if len(region.members) == 1:  # its storage begins at its first byte, not at an aligned address
                piece.start, piece.offset, piece.nbytes = 0, region.offset + start * size, piece.span * size
                offsets[i] = piece.offset
    first: dict[tuple[object, ...], int] = {}  # offset of the first of several equal views
    for i in packed:
        x, piece = tensors[i], pieces[i]
        piece.stride, piece.span, piece.nbytes = torch.empty_like(x, device="meta").stride(), x.numel(), x.nbytes
        piece.offset = first.setdefault((x.device, *rows[i][:4]), cursor)
        if piece.offset == cursor:
            cursor += _aligned(piece.nbytes)
    return cursor, offsets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def tensors_over(view: memoryview, layout: Layout) -> list[torch.Tensor]:
    """Create the tensors of the copy over ``view``, the host memory of the layout.

    Tensors in one region share one storage, whose size is the size of the region.
    """
    made: list[Any] = layout.description.create(view, layout.offsets)
    storages: dict[int, torch.UntypedStorage] = {}
    for i in layout.others:
        piece, dtype = layout.pieces[i], layout.signature[i][1]
        if piece.span == 0:
            made[i] = torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device="cpu")
            continue
        if piece.offset not in storages:
            whole = torch.frombuffer(view, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
            storages[piece.offset] = whole.untyped_storage()
        empty = torch.empty(0, dtype=dtype, device="cpu")
        made[i] = empty.set_(storages[piece.offset], piece.start, piece.shape, piece.stride)
    return made


def region_bytes(region: Region, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over the source bytes of a region in ``storage``.

    Raises:
        StagingError: the storage was freed or resized after the layout was planned. ``path`` is a tensor index.
    """
    if not is_in(region, storage):  # otherwise set_ would enlarge the storage
        raise StagingError([region.source], "its storage was freed or resized while it was being copied")
    source = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return source.set_(storage, region.address - storage.data_ptr(), (region.nbytes,), (1,))


def is_in(region: Region, storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` still contains the source bytes of a region."""
    base = storage.data_ptr()
    return base <= region.address and region.address + region.nbytes <= base + storage.nbytes()
