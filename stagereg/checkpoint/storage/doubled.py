"""``dcp`` with a second file, in which every byte follows from its tensors: a rank that has the same makes it too.

So what several machines hold need not be sent from one to the other: each writes the file, and they compare checksums.
In it the tensors are in the order of their names, each as torch saves it (:mod:`.envelope`), one behind the other.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.checkpoint.format.wrappers import wraps
from stagereg.checkpoint.storage.dcp import DcpStorage, result_of, write_tensor
from stagereg.checkpoint.storage.envelope import Envelope, envelope


def doubled_name(rank: int) -> str:
    """Return the name of the file of a rank that others make too."""
    return f"__{rank}_1{DEFAULT_SUFFIX}"


class DoubledStorage(DcpStorage):
    """Writes the files of a rank, one of them as others make it, and that of another rank.

    Attributes:
        doubled: the names of the tensors that go into it, in the next :meth:`write_data`.
    """

    doubled: Collection[str] = ()

    def __init__(self, direct: str) -> None:
        super().__init__(direct=direct)
        self._split: tuple[list[WriteItem], Collection[str]] | None = None  # what the next two are made of
        self._own: list[WriteItem] = []
        self._both: list[WriteItem] = []
        self._joined: tuple[list[WriteResult], list[WriteResult], list[WriteResult]] = [], [], []

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if self._split is None or self._split[0] is not items or self._split[1] is not self.doubled:
            named = [item for item in items if item.index.fqn in self.doubled]
            both = {item.index.fqn: item for item in named if _around(planner.resolve_data(item)) is not None}
            self._both = [both[name] for name in sorted(both)]
            self._own = [item for item in items if item.index.fqn not in both] if both else items
            self._split = items, self.doubled
        own, both_results = super().write_files(rank, self._own, planner), list[WriteResult]()
        if not self._both:
            return own
        with self.create(name := doubled_name(rank)) as file:
            for item in self._both:
                x = planner.resolve_data(item)
                if isinstance(x, torch.Tensor) and (around := _around(x)) is not None:
                    both_results.append(result_of(item, name, write_tensor(file, x.detach(), around), x, around))
        if self._joined[0] is not own or self._joined[1] != both_results:
            self._joined = own, both_results, own + both_results  # the same object where all is in its old place
        return self._joined[2]

    def write_double(self, path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        """Write such a file of another rank at ``path``, with tensors that this one has too.

        Returns:
            Its size in bytes, and the CRC-32 of each block of :data:`.aligned.BLOCK_BYTES`. It has no mark.
        """
        self.path, name = os.path.split(path)
        with self.create(name) as file:
            for _, x in sorted(tensors.items()):
                if (around := _around(x)) is not None:
                    write_tensor(file, x, around)
        return self._marks.pop(name).bytes, self.blocks.pop(name)


def _around(x: object) -> Envelope | None:
    if not isinstance(x, torch.Tensor) or wraps(x):
        return None
    return envelope(x.detach().resolve_conj().resolve_neg())
