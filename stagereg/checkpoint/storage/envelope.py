"""The archive of one tensor in a file of torch's distributed checkpoint, as ``torch.save`` writes it.

The archive is a zip file whose one large record is the content of the tensor's storage::

    offset                         offset + len(head)                            offset + length
    | head: form of the tensor, …  | content: the elements, nothing between them | tail: checksums, directory |

The head and the tail depend only on dtype, shape and strides, except for the zip's checksums, which ``torch.load``
ignores (``torch.serialization.set_crc32_options``). So ``torch.save`` writes them only once for each kind of tensor.
"""

from __future__ import annotations

import functools
import io
import mmap
from dataclasses import dataclass

import torch

_KEPT = 1 << 15  # maximum cached envelopes, one for each kind of tensor
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name from 3.13 on


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before and after a tensor's content. ``stride``: the strides of the elements in the content."""

    head: bytes
    tail: bytes
    stride: tuple[int, ...]


def envelope(x: torch.Tensor) -> Envelope | None:
    """Return the bytes around the content of ``x``, a tensor on any device.

    The strides have no gaps, as in ``torch.empty_like``. The result is ``None`` for subclasses, sparse, quantized and
    empty tensors, and if torch cannot omit the content.
    """
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
        return None
    return _asked(x.dtype, x.shape, x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride())


@functools.lru_cache(_KEPT)
def _asked(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Envelope | None:
    nbytes = shape.numel() * dtype.itemsize
    # Only reserve the memory, because it may be huge and is never read.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    reserved = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    archive = _Archive()
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(0, dtype=dtype, device="cpu").set_(reserved, 0, shape, stride), archive)
    except (RuntimeError, KeyError, NotImplementedError):
        return None
    if [size for _, size in archive.holes] != [nbytes]:
        return None
    begin = archive.holes[0][0]
    return Envelope(archive.getvalue()[:begin], archive.getvalue()[begin:], stride)


class _Archive(io.BytesIO):
    """A file object for ``torch.save``. Omits the ranges that torch skips, and records their offsets and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.holes: list[tuple[int, int]] = []

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.holes.append((self.tell(), offset))
        return self.tell()
