"""``join_hook=ema``: update an average of the weights on ranks without data, and agree on its buffers at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from stagereg import JoinHook

from lean_export.average import WeightAverage

__all__ = ["EmaHook"]


class EmaHook(JoinHook):
    """Updates the average once per step of the active ranks.

    The weights of all ranks are equal after each step, and so are their averages. Buffers, such as running statistics,
    come from each rank's own batches: in the end all ranks take those of a rank that had data to the last, which is
    what DDP does with the module's.

    Args:
        average: the average.
        process_group: the ranks that train together; ``None`` is the default group.
        due: tells whether the active ranks update now; always, if it is not given.
    """

    def __init__(
        self,
        average: WeightAverage,
        process_group: dist.ProcessGroup | None = None,
        due: Callable[[], bool] | None = None,
    ) -> None:
        self._average = average
        self._group = process_group
        self._due = due

    def main_hook(self) -> None:
        """Update, after the hooks of the model and of its optimizer."""
        if self._due is None or self._due():
            self._average.update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the buffers of the highest rank among the last ones; collective, on every rank."""
        buffers = self._average.buffers()
        if not buffers:
            return
        source = torch.tensor(dist.get_rank(self._group) if is_last_joiner else -1, device=buffers[0].device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=self._group)
        for buffer in buffers:
            dist.broadcast(buffer, group=self._group, group_src=int(source))
