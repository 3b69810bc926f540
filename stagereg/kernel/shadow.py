"""The join wire: the collectives by which ranks with data and ranks without stay in step.

Each training step, an active rank *announces* itself (adds one) and a joined rank *counts* (adds zero) in the same
all-reduce. If the join is to throw, a second all-reduce has the active ranks stop. The sequence, shapes and dtypes
are those of ``torch.distributed.algorithms.join`` (torch 2.13), so ranks with torch's ``Join`` can share a job.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagereg.errors import UnevenInputsError

PEER_EXHAUSTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
"""What an active rank raises, in torch's words."""


class TorchWire:
    """One rank's end of the wire, whose tensors of one element live on ``device``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def announce(self, present: bool = True) -> dist.Work:
        """Active rank, once a step and before its collectives: add one to the step's sum, or zero if not ``present``.

        When the returned work is done, its tensor holds the number of active ranks.
        """
        mine = torch.full((1,), float(present), dtype=torch.get_default_dtype(), device=self.device)
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        assert work is not None
        return work

    def count_active(self) -> int:
        """Joined rank, once a step: how many ranks are still active. Waits for them."""
        return int(self._sum(0.0))

    def raise_if_exhausted(self, joined: bool = False) -> None:
        """Rank that may have to throw, after it has announced or counted: raise if it, or another, is out of data."""
        if self._sum(float(joined)):
            rank = dist.get_rank(self.group) if joined else None
            raise UnevenInputsError(PEER_EXHAUSTED if rank is None else f"Rank {rank} exhausted all inputs.", rank)

    def _sum(self, mine: float) -> float:
        total = torch.full((1,), mine, dtype=torch.get_default_dtype(), device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()
