"""Many tensors in shared memory as one small message, which another process opens into equal tensors.

``multiprocessing`` pickles tensor by tensor, at some thirty microseconds each. A :class:`Parcel` is a table of numbers,
pickled at once by whatever pickles. It brings the room around the tensors along (``room``), so that a storage in the
other process finds it as it would here. The sender holds the tensors until the receiver has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stagereg.kernel.memory import padding_around, register_padding
from stagereg.stagers.shared_memory import Passage, enter, passage_to

__all__ = ["Parcel", "fits", "pack", "unpack"]

_NOWHERE = -1

_Row = tuple[int, int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool]
"""Number of the block, offset in bytes, elements from first to last, dtype, shape, stride, conjugated, negated."""


@dataclass
class Parcel:
    """What is sent.

    Attributes:
        passages: the blocks that the tensors lie in.
        rows: one for each tensor.
        margins: for each block, the bytes left free before and after tensors.
        spans: for each block, offset and bytes of the tensors that have this room.
    """

    passages: list[Passage] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    margins: list[tuple[int, int]] = field(default_factory=list)
    spans: list[dict[int, int]] = field(default_factory=list)


def fits(x: torch.Tensor) -> bool:
    """Whether a tensor can go into a parcel: a plain one on the CPU."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout is torch.strided
    return plain and not x.is_quantized


def pack(tensors: Sequence[torch.Tensor]) -> tuple[Parcel, list[int]]:
    """Return a parcel of tensors that fit, and the indices of those that do not lie in shared memory.

    The rows of the latter say nothing: copy these into shared memory and pack again. Hold the tensors until the
    receiver has answered.
    """
    parcel = Parcel()
    begins: list[tuple[int, int]] = []
    outside: list[int] = []
    for i, x in enumerate(tensors):
        shape, stride = tuple(x.shape), tuple(x.stride())
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if x.numel() else 0
        at = _block(parcel, begins, x.data_ptr()) if span else _NOWHERE
        if span and at == _NOWHERE:
            outside.append(i)
        offset = x.data_ptr() - begins[at][0] if at != _NOWHERE else 0
        parcel.rows.append((at, offset, span, x.dtype, shape, stride, x.is_conj(), x.is_neg()))
        room = padding_around(x) if at != _NOWHERE else None
        if room is not None:
            parcel.margins[at] = (room.before, room.after)
            parcel.spans[at][offset] = x.nbytes
    return parcel, outside


def unpack(parcel: Parcel) -> list[torch.Tensor]:
    """Return the tensors, in the order they were packed in, each with a storage of the bytes it spans.

    Raises: ``StagingError`` if the sender's memory cannot be opened.
    """
    views = [enter(passage) for passage in parcel.passages]
    for view, margins, spans in zip(views, parcel.margins, parcel.spans, strict=True):
        if spans:
            register_padding(view, margins, spans)
    made: list[torch.Tensor] = []
    for at, offset, span, dtype, shape, stride, conj, neg in parcel.rows:
        if at == _NOWHERE:
            x = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            x = torch.frombuffer(views[at], dtype=dtype, count=span, offset=offset).as_strided(shape, stride)
        x = torch._neg_view(x) if neg else x
        made.append(x.conj() if conj else x)
    return made


def _block(parcel: Parcel, begins: list[tuple[int, int]], address: int) -> int:
    for at, (begin, end) in enumerate(begins):
        if begin <= address < end:
            return at
    found = passage_to(address)
    if found is None:
        return _NOWHERE
    passage, begin = found
    begins.append((begin, begin + passage.nbytes))
    parcel.passages.append(passage)
    parcel.margins.append((0, 0))
    parcel.spans.append({})
    return len(begins) - 1
