"""What torch saves around a tensor's bytes.

In a file of torch's distributed checkpoint a tensor is what ``torch.save`` writes: a zip archive whose one large record
is the content of the tensor's storage. All before that record and all behind it depend on dtype, shape and stride
alone, but for checksums of the zip, which ``torch.load`` does not look at (``torch.serialization.set_crc32_options``).
So torch is asked once for each kind of tensor, under ``torch.serialization.skip_data``, which leaves the record out.
"""

from __future__ import annotations

import functools
import mmap
import sys
from dataclasses import dataclass

import torch

__all__ = ["Envelope", "envelope", "saved_stride"]

_KEPT = 1 << 15  # a model has as many kinds of tensor as it has tensors at worst
_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before and behind a tensor's content."""

    head: bytes
    tail: bytes


def saved_stride(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the stride, in elements, with which a tensor is saved, its content being packed in memory order.

    Torch keeps the strides of a tensor without holes and overlaps, and packs another (``Tensor.clone``). None is
    returned where the content is not all of it, or none: subclasses, sparse and quantized tensors, lazy conjugates and
    negatives, empty ones, and views as large as their storage that do not cover it once.
    """
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_quantized or x.device.type == "meta":
        return None
    if x.is_conj() or x.is_neg() or x.numel() == 0:
        return None
    if x.is_contiguous():
        return x.stride()
    stride = torch.empty_like(x, device="meta").stride()
    if stride != x.stride() and x.untyped_storage().nbytes() == x.nbytes:
        return None
    return stride


@functools.lru_cache(_KEPT)
def envelope(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Envelope | None:
    """Return what goes around the content of such a tensor; None where torch does not know how to leave that out."""
    nbytes = shape.numel() * dtype.itemsize
    archive = _Archive()
    try:
        with torch.serialization.skip_data():
            torch.save(_hollow(dtype, shape, stride, nbytes), archive)  # type: ignore[arg-type]
    except (RuntimeError, KeyError, NotImplementedError):
        return None
    return archive.around(nbytes)


def _hollow(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], nbytes: int) -> torch.Tensor:
    """Return a tensor of that kind over memory that is only reserved: it may be huge and is never read."""
    if not sys.platform.startswith("linux"):
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    promised = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(promised, 0, shape, stride)


class _Archive:
    """A file for ``torch.save`` that keeps what is written and not what is passed over."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        self._parts.append((self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset if whence == 0 else self._position + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...

    def around(self, nbytes: int) -> Envelope | None:
        """Return what lies before and behind the one hole, if that is of ``nbytes`` bytes."""
        sides: list[list[bytes]] = [[]]
        end = 0
        for begin, data in sorted(self._parts):
            if begin != end:
                if begin != end + nbytes or len(sides) > 1:
                    return None
                sides.append([])
            sides[-1].append(data)
            end = begin + len(data)
        return Envelope(b"".join(sides[0]), b"".join(sides[1])) if len(sides) == 2 else None
