"""The archive that a tensor is in a file of torch's distributed checkpoint, as ``torch.save`` writes it.

It is a zip archive whose one large record is the content of the tensor's storage::

    offset                         offset + len(head)                            offset + length
    | head: form of the tensor, …  | content: the elements, nothing between them | tail: checksums, directory |

Head and tail depend on dtype, shape and stride alone, but for checksums of the zip, which ``torch.load`` does not look
at (``torch.serialization.set_crc32_options``). So torch is asked once for each kind of tensor, under
``torch.serialization.skip_data``, which leaves the content out (:func:`envelope`). Where the content of a tensor begins
is in what the writer returns (:class:`.TensorResult`).
"""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass

import torch

__all__ = ["Envelope", "envelope"]

_KEPT = 1 << 15  # a model has as many kinds of tensor as it has tensors at worst
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around a tensor's content: the bytes before and behind it; ``stride`` is how the content lies in it."""

    head: bytes
    tail: bytes
    stride: tuple[int, ...]


def envelope(x: torch.Tensor) -> Envelope | None:
    """Return what goes around the content of ``x``, on any device.

    Its strides are kept if it is contiguous or has neither holes nor overlaps, and packed by the rule of
    ``torch.empty_like`` otherwise. None is returned for subclasses, sparse, quantized and empty tensors, and where
    torch does not know how to leave the content out.
    """
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_quantized or x.is_meta or not x.numel():
        return None
    return _asked(x.dtype, x.shape, x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride())


@functools.lru_cache(_KEPT)
def _asked(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Envelope | None:
    nbytes = shape.numel() * dtype.itemsize
    # Memory that is only reserved: it may be huge and is never read.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    reserved = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    archive = _Archive()
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(0, dtype=dtype, device="cpu").set_(reserved, 0, shape, stride), archive)  # type: ignore[arg-type]
    except (RuntimeError, KeyError, NotImplementedError):
        return None
    if archive.holes != [nbytes]:
        return None
    return Envelope(bytes(archive.parts[0]), bytes(archive.parts[1]), stride)


class _Archive:
    """A file for ``torch.save`` that keeps what is written, in parts, and the sizes of the holes between them."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.holes: list[int] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        hole = offset - self._position if whence == 0 else offset
        if hole:
            self.holes.append(hole)
            self.parts.append(bytearray())
        self._position += hole
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...
