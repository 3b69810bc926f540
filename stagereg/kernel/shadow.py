"""torch's join protocol: the collectives that keep ranks with and without data in step.

In each training step, an active rank *announces* itself (adds one) and a joined rank *counts* (adds zero) in the same
all-reduce. If the join throws, a second all-reduce stops the active ranks. The sequence, shapes and dtypes match
``torch.distributed.algorithms.join`` (torch 2.13), so ranks with torch's ``Join`` can take part in the same job.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagereg.errors import UnevenInputsError

PEER_EXHAUSTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
"""The message of an active rank's error, in torch's words."""


class TorchWire:
    """One rank's endpoint of torch's join protocol. Its one-element tensors are on ``device``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def announce(self, present: bool = True) -> dist.Work:
        """Add one (zero if not ``present``) to the step's sum, on an active rank before its collectives of each step.

        When the returned work completes, its tensor holds the number of active ranks.
        """
        mine = torch.full((1,), float(present), dtype=torch.get_default_dtype(), device=self.device)
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        assert work is not None
        return work

    def count_active(self) -> int:
        """Return how many ranks are still active: on a joined rank, once per step. Waits for these ranks."""
        return int(self._sum(0.0))

    def raise_if_exhausted(self, joined: bool = False) -> None:
        """Raise if any rank is out of data: on a rank that may throw, after it has announced or counted."""
        if self._sum(float(joined)):
            rank = dist.get_rank() if joined else None
            raise UnevenInputsError(PEER_EXHAUSTED if rank is None else f"Rank {rank} exhausted all inputs.", rank)

    def _sum(self, mine: float) -> float:
        total = torch.full((1,), mine, dtype=torch.get_default_dtype(), device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()
