"""The copy that casts on the way: wide floating tensors in, bfloat16 tensors in memory of its own out.

What stagereg's kernel knows is used as it is: which tensors share memory and which views are worth their holes
(``layout``), memory that comes back when its last reader is gone (``memory``), and streams (``transfer``). Only the
bytes are other ones, so what is laid out here are elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from stagereg.errors import StagingError
from stagereg.kernel.layout import ALIGNMENT, plan_layout, signature
from stagereg.kernel.memory import Pool
from stagereg.kernel.transfer import CopyEngine

__all__ = ["WIDE", "CastingCopier"]

WIDE = (torch.float32, torch.float64)
"""What is cast. float16 has as many bytes as bfloat16 has, and would only lose digits."""


@dataclass
class _Run:
    """Elements that are copied together: a region of memory, or a view that is packed.

    Attributes:
        source: what is copied.
        stride: that its copy gets.
        members: by index, the shape, stride and first element of the tensors that lie in the copy.
    """

    source: torch.Tensor
    stride: tuple[int, ...]
    members: dict[int, tuple[tuple[int, ...], tuple[int, ...], int]]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that its copy takes."""
        return -(-self.source.numel() * torch.bfloat16.itemsize // ALIGNMENT) * ALIGNMENT


class CastingCopier:
    """Copies tensors to bfloat16 in host memory. One thread at a time may call it.

    Args:
        pool: where the memory comes from; closed together with the copier.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._engine = CopyEngine(threads=1)  # the casting is torch's, and so are its threads

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return bfloat16 copies of plain strided tensors of :data:`WIDE` dtypes, from any devices.

        What shares memory goes on sharing it, strides stay, and a view costs its own elements.

        Raises:
            StagingError: a tensor reaches beyond its storage; ``path`` is its index. Or memory ran out.
            StagerClosedError: after :meth:`close`.
        """
        runs = [run for dtype in WIDE for run in _runs({i: x for i, x in enumerate(tensors) if x.dtype == dtype})]
        made = {i: _empty(x) for i, x in enumerate(tensors) if not x.numel()}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        view, offset = self._pool.lease().view(self._pool.take(sum(run.nbytes for run in runs))), 0
        for run in runs:
            flat = torch.frombuffer(view, dtype=torch.bfloat16, count=run.source.numel(), offset=offset)
            offset += run.nbytes
            pairs.append((flat.as_strided(run.source.shape, run.stride), run.source))
            made.update((i, flat.as_strided(*geometry)) for i, geometry in run.members.items())
        for _, event in self._engine.fetch(pairs):
            event.synchronize()
        return [made[i] for i in range(len(tensors))]

    def close(self) -> None:
        """Free the memory that is kept. Copies handed out stay valid. Twice is harmless."""
        self._pool.close()
        self._engine.close()


def _runs(tensors: Mapping[int, torch.Tensor]) -> list[_Run]:
    """What is to be copied of tensors of one dtype, by their indices; those without elements are left out."""
    index, listed = list(tensors), list(tensors.values())
    try:
        layout = plan_layout(listed, signature(listed))
    except StagingError as error:
        raise type(error)([index[int(str(i))] for i in error.path], error.reason) from error
    runs = []
    for region in (*layout.regions, *layout.remote):
        first = min((listed[i] for i in region.members), key=torch.Tensor.data_ptr)
        starts = {i: (listed[i].data_ptr() - first.data_ptr()) // first.element_size() for i in region.members}
        elements = max(start + layout.pieces[i].span for i, start in starts.items())
        source = torch.empty(0, dtype=first.dtype, device=first.device)
        source.set_(first.untyped_storage(), first.storage_offset(), (elements,), (1,))
        places = {index[i]: (layout.pieces[i].shape, layout.pieces[i].stride, start) for i, start in starts.items()}
        runs.append(_Run(source, (1,), places))
    packed: dict[int, _Run] = {}
    for i in layout.packed:  # a view that is there twice has one place
        piece = layout.pieces[i]
        run = packed.setdefault(piece.offset, _Run(listed[i], piece.stride, {}))
        run.members[index[i]] = (piece.shape, piece.stride, 0)
    return [*runs, *packed.values()]


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16)
