"""The collectives of torch's join protocol, which keep ranks with and without data in the same step.

In each training step, all ranks run one all-reduce: an active rank *announces* the step by adding one, and a rank that
left the loop adds zero, to *count* the active ranks. If the join throws, a second all-reduce stops the active ranks.
The order, shapes and dtypes match ``torch.distributed.algorithms.join`` (torch 2.13), so ranks with torch's ``Join``
can take part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagereg.errors import UnevenInputsError

PEER_EXHAUSTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
"""The message of the error on an active rank, copied from torch."""


class TorchWire:
    """One rank's endpoint of torch's join protocol. Its one-element tensors are on ``device``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def announce(self, present: bool = True) -> dist.Work:
        """Announce a step on an active rank: add one to the sum, or zero if not ``present``. Called before the step.

        When the returned work completes, its tensor contains the number of active ranks.
        """
        mine = torch.full((1,), float(present), dtype=torch.get_default_dtype(), device=self.device)
        work = dist.all_reduce(mine, group=self.group, async_op=True)
        assert work is not None
        return work

    def count_active(self) -> int:
        """Return the number of active ranks. Called once per step on a rank that left the loop. Waits for the ranks."""
        return int(self._sum(0.0))

    def raise_if_exhausted(self, joined: bool = False) -> None:
        """Raise if any rank is out of data. Collective. Called after :meth:`announce` or :meth:`count_active`."""
        if self._sum(float(joined)):
            rank = dist.get_rank() if joined else None
            raise UnevenInputsError(PEER_EXHAUSTED if rank is None else f"Rank {rank} exhausted all inputs.", rank)

    def _sum(self, mine: float) -> float:
        total = torch.full((1,), mine, dtype=torch.get_default_dtype(), device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item()
