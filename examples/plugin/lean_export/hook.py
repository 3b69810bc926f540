"""``join_hook=ema``: averages weights on ranks without data, and makes buffers equal on all ranks at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from stagereg.plugin import JoinHook

if TYPE_CHECKING:
    from lean_export.joinable import EmaJoinable

__all__ = ["EmaHook"]


class EmaHook(JoinHook):
    """Updates the average once per step of the active ranks.

    The weights of all ranks are equal after each step, and so are their averages. Buffers, such as running statistics,
    depend on each rank's own batches. At the end, all ranks copy the buffers of a rank that had data in the last step,
    as DDP does with the buffers of the module.

    Args:
        joinable: the joinable with the average.
    """

    def __init__(self, joinable: EmaJoinable, /) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        """Update the average, after the hooks of the model and its optimizer."""
        if self.joinable.is_due():
            self.joinable.update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the buffers of the highest rank among the last joiners. Collective."""
        buffers = self.joinable.average.buffers()
        if not buffers:
            return
        group = self.joinable.join_process_group
        source = torch.tensor(dist.get_rank(group) if is_last_joiner else -1, device=buffers[0].device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=group)
        for buffer in buffers:
            dist.broadcast(buffer, group=group, group_src=int(source))
