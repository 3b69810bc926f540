"""``join_hook=ema``: averages weights on ranks without data, and agrees on buffers at the end."""

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
    come from each rank's own batches: in the end all ranks take those of a rank that had data to the last, which is
    what DDP does with the module's.

    Args:
        joinable: the joinable that has the average.
    """

    def __init__(self, joinable: EmaJoinable, /) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        """Update, after the hooks of the model and of its optimizer."""
        if self.joinable.is_due():
            self.joinable.update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the buffers of the highest rank among the last ones; collective, on every rank."""
        buffers = self.joinable.average.buffers()
        if not buffers:
            return
        group = self.joinable.join_process_group
        source = torch.tensor(dist.get_rank(group) if is_last_joiner else -1, device=buffers[0].device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=group)
        for buffer in buffers:
            dist.broadcast(buffer, group=group, group_src=int(source))
