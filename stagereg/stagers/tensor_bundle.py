"""Many tensors in shared memory as one small message, which another process opens into equal tensors.

``multiprocessing`` pickles tensor by tensor, at some thirty microseconds each. A :class:`TensorBundle` is a table of
numbers, pickled at once by any pickler. It also has the padding around the tensors, so that a storage in the other
process finds it as in this one. The sender holds the tensors until the receiver has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stagereg.kernel.layout import span_of
from stagereg.kernel.memory import padding_around, register_padding
from stagereg.kernel.state_dict import flip
from stagereg.stagers.shared_memory import SharedMemoryHandle, handle_of

__all__ = ["TensorBundle", "pack", "unpack"]

_NO_BLOCK = -1

_Row = tuple[int, int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool]
"""Number of the block, offset in bytes, elements from first to last, dtype, shape, stride, negated, conjugated."""


@dataclass
class TensorBundle:
    """What is sent; the first three are of each block that the tensors lie in."""

    handles: list[SharedMemoryHandle] = field(default_factory=list)
    margins: list[tuple[int, int]] = field(default_factory=list)  # bytes of padding before and after tensors
    spans: list[dict[int, int]] = field(default_factory=list)  # offset and bytes of the tensors that have it
    rows: list[_Row] = field(default_factory=list)


def pack(tensors: Sequence[torch.Tensor]) -> tuple[TensorBundle, list[int]]:
    """Return a bundle of plain tensors, and the indices of those that do not lie in shared memory.

    The rows of the latter are of no use: copy these tensors into shared memory and pack again. Hold the tensors until
    the receiver has answered.
    """
    bundle = TensorBundle()
    begins: list[int] = []
    outside: list[int] = []
    for i, x in enumerate(tensors):
        elements = span_of(x)
        at = _block_of(x.data_ptr(), bundle, begins) if elements else _NO_BLOCK
        if elements and at == _NO_BLOCK:
            outside.append(i)
        offset = x.data_ptr() - begins[at] if at != _NO_BLOCK else 0
        bundle.rows.append((at, offset, elements, x.dtype, tuple(x.shape), x.stride(), x.is_neg(), x.is_conj()))
        padding = padding_around(x) if at != _NO_BLOCK else None
        if padding is not None:
            bundle.margins[at] = (padding.before, padding.after)
            bundle.spans[at][offset] = x.nbytes
    return bundle, outside


def _block_of(address: int, bundle: TensorBundle, begins: list[int]) -> int:
    for at, (handle, begin) in enumerate(zip(bundle.handles, begins, strict=True)):
        if begin <= address < begin + handle.nbytes:
            return at
    found = handle_of(address)
    if found is None:
        return _NO_BLOCK
    handle, begin = found
    begins.append(begin)
    bundle.handles.append(handle)
    bundle.margins.append((0, 0))
    bundle.spans.append({})
    return len(begins) - 1


def unpack(bundle: TensorBundle) -> list[torch.Tensor]:
    """Return the tensors, in the order they were packed in, each with a storage of the bytes it spans.

    Raises: ``StagingError`` if the sender's memory cannot be opened.
    """
    views = [handle.attach() for handle in bundle.handles]
    for view, margins, spans in zip(views, bundle.margins, bundle.spans, strict=True):
        if spans:
            register_padding(view, margins, spans)
    made: list[torch.Tensor] = []
    for at, offset, elements, dtype, shape, stride, negative, conjugate in bundle.rows:
        if at == _NO_BLOCK:
            x = torch.empty_strided(shape, stride, dtype=dtype)
        else:
            x = torch.frombuffer(views[at], dtype=dtype, count=elements, offset=offset).as_strided(shape, stride)
        made.append(flip(x, negative, conjugate))
    return made
