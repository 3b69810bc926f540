"""Tensors that lie in memory as they will in a file of torch's distributed checkpoint, but for what goes around them.

A stager that reserved padding around each tensor (:mod:`stagereg.kernel.memory`) has made its memory nearly the image
of the file. Which tensors those are, and the head and tail of each, is worked out once for a plan (:class:`Image`) and
used for every later copy with the same layout; writing heads and tails is then one batch of small copies.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from stagereg.checkpoint.format.encoding import without_gc
from stagereg.checkpoint.format.wrappers import wraps
from stagereg.checkpoint.storage.envelope import Envelope, envelope
from stagereg.kernel.memory import Padding, padding_around
from stagereg.kernel.transfer import Batch

_GAP_BYTES = 2048  # more than what the padding leaves free between two tensors


class InPlace(NamedTuple):
    """A tensor, with head and tail, from byte ``begin`` to ``end`` of its block of memory."""

    begin: int
    end: int
    item: WriteItem
    around: Envelope


class _Block:
    """A block of memory with such tensors.

    Attributes:
        tensors: those in it.
        runs: the same, those together that follow one another in memory.
    """

    def __init__(self, padding: Padding) -> None:
        self._padding, self.tensors = padding, list[InPlace]()
        self.runs: list[list[InPlace]] = []

    def arrange(self) -> None:
        """Be ready for :meth:`put_around`; after the last tensor."""
        before, after = self._padding.before, self._padding.after
        kinds = list(dict.fromkeys(each.around for each in self.tensors))
        # All of the padding is written, so that nothing gets into the file that happened to be in the memory.
        pieces = [kind.head.rjust(before, b"\0") + kind.tail.ljust(after, b"\0") for kind in kinds]
        self._pieces = ctypes.create_string_buffer(b"".join(pieces))
        first = ctypes.addressof(self._pieces)
        places = {kind: first + at * (before + after) for at, kind in enumerate(kinds)}
        moves: list[tuple[int, int, int]] = []
        for each in sorted(self.tensors, key=lambda each: each.begin):
            if not self.runs or each.begin - self.runs[-1][-1].end > _GAP_BYTES:
                self.runs.append([])
            self.runs[-1].append(each)
            kind = each.around
            moves.append((each.begin + len(kind.head) - before, places[kind], before))
            moves.append((each.end - len(kind.tail), places[kind] + before, after))
        self._batch = Batch(moves)

    def address_in(self, planner: SavePlanner) -> int | None:
        """Return the address of the block where ``planner``'s copy has these tensors so; ``None`` if there is none."""
        data = [planner.resolve_data(each.item) for each in self.tensors]
        tensors = [x for x in data if isinstance(x, torch.Tensor)]
        if len(tensors) < len(data) or not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        padding = padding_around(tensors[0])
        if padding is None or _layout(padding) != _layout(self._padding):
            return None
        places = [padding.address + each.begin + len(each.around.head) for each in self.tensors]
        is_lazy = any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors))
        return padding.address if [*map(torch.Tensor.data_ptr, tensors)] == places and not is_lazy else None

    def put_around(self, address: int) -> None:
        """Put head and tail around each tensor, in the block at ``address``."""
        for piece in self._batch.pieces(1):
            piece(address)


class Image:
    """Which tensors of a copy lie in memory as they will in the file, for the items of one plan.

    Attributes:
        items: of the plan.
        blocks: of memory with tensors that lie so.
        others: the items that do not.
    """

    @without_gc()
    def __init__(self, items: list[WriteItem], planner: SavePlanner) -> None:
        self.items, self.others = items, list[WriteItem]()
        blocks: dict[int, _Block] = {}
        written: dict[int, Envelope] = {}
        for item in items:
            data = planner.resolve_data(item) if item.type is not WriteItemType.BYTE_IO else None
            x = None
            if isinstance(data, torch.Tensor) and not wraps(data):
                x = data.detach().resolve_conj().resolve_neg()
            around = None if x is None else envelope(x)
            padding = None if x is None else padding_around(x)
            if x is None or around is None or padding is None or not _fits(padding, around):
                self.others.append(item)
                continue
            if written.setdefault(x.data_ptr(), around) != around:  # by another view of the same tensor
                self.others.append(item)
                continue
            begin = x.data_ptr() - padding.address - len(around.head)
            end = begin + len(around.head) + x.nbytes + len(around.tail)
            block = blocks.setdefault(padding.address, _Block(padding))
            block.tensors.append(InPlace(begin, end, item, around))
        self.blocks = [*blocks.values()]
        for block in self.blocks:
            block.arrange()

    def addresses_in(self, items: list[WriteItem], planner: SavePlanner) -> list[int] | None:
        """Return the addresses of the blocks in another copy; ``None`` if that, or the plan, is another one."""
        if items is not self.items:
            return None
        found = list[int]()
        for block in self.blocks:
            if (address := block.address_in(planner)) is None:
                return None
            found.append(address)
        return found


def _fits(padding: Padding, around: Envelope) -> bool:
    return len(around.head) <= padding.before and len(around.tail) <= padding.after


def _layout(padding: Padding) -> object:
    return padding.before, padding.after, padding.spans
