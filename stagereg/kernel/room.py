"""The room that was left around staged tensors, for a storage that writes a file's image in place.

A storage may need a few bytes before and after each tensor, so that a staged block as it lies in memory is the content
of a file. A stager told to ``leave_room`` lays its copies out with such gaps; :func:`room_around` finds them again from
nothing but the tensor. The gaps belong to whoever holds the tensor.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass

import torch

__all__ = ["Room", "room_around", "tell"]


@dataclass(frozen=True, slots=True)
class Room:
    """Where a staged tensor lies, and what is free around it.

    Attributes:
        address, nbytes: of the whole block that the copy lies in; multiples of 4096 bytes, and all of it may be read.
        before, after: bytes next to the tensor's first and last byte that nothing else uses.
    """

    address: int
    nbytes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    nbytes: int
    margins: tuple[int, int]
    spans: dict[int, int]  # offset in the block -> bytes, of the tensors that have the margins to themselves


_blocks: dict[int, _Block] = {}
_serials = itertools.count()
_lock = threading.Lock()


def tell(view: memoryview, address: int, nbytes: int, margins: tuple[int, int], spans: dict[int, int]) -> None:
    """Make known, for as long as ``view`` lives, that tensors at ``spans`` of a block have ``margins`` around them."""
    serial = next(_serials)
    with _lock:
        _blocks[serial] = _Block(address, nbytes, margins, spans)
    weakref.finalize(view, _blocks.pop, serial, None).atexit = False


def room_around(x: torch.Tensor) -> Room | None:
    """Return the room around a contiguous staged tensor; None where none was left, or where it shares its memory."""
    if x.device.type != "cpu" or x.layout is not torch.strided or not x.is_contiguous():
        return None
    address = x.data_ptr()
    for block in tuple(_blocks.values()):
        if block.address <= address < block.address + block.nbytes:
            if block.spans.get(address - block.address) != x.nbytes:
                return None
            return Room(block.address, block.nbytes, *block.margins)
    return None
