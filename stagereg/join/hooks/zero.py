"""``zero``: take part in the step of a ``ZeroRedundancyOptimizer``.

A joined rank owns a shard of the parameters that nobody else updates, so it steps that shard and takes part in the
broadcasts. Right numbers need the step's gradients in ``param.grad`` first; stagereg's ``ddp`` hook puts them there,
torch's does not. (torch 2.13, ``distributed/optim/zero_redundancy_optimizer.py``.)
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.optim import ZeroRedundancyOptimizer

from stagereg.errors import JoinError
from stagereg.join.joinable import JoinConfig, JoinHook
from stagereg.registry import register

__all__ = ["ZeroHook"]


@register("join_hook", "zero")
class ZeroHook(JoinHook):
    """Steps the optimizer once per step of the active ranks.

    Args:
        zero: the optimizer; ``overlap_with_ddp`` is not supported, since its step happens inside DDP's backward.
        due: tells whether the active ranks step now; always, if it is not given. With DDP, it is whether the gradients
            were reduced, so that ``no_sync`` steps are left out.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, due: Callable[[], bool] | None = None) -> None:
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise JoinError(f"the zero join hook needs a ZeroRedundancyOptimizer, not a {type(zero).__name__}")
        if zero._overlap_with_ddp:
            raise JoinError("a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be joined; build it without")
        self.zero = zero
        self._due = due

    def main_hook(self) -> None:
        """Step this rank's shard and take part in the broadcasts."""
        if self._due is not None and not self._due():
            return
        config = self.zero._join_config
        self.zero._join_config = JoinConfig.construct_disabled_join_config()  # a shadow step announces nobody
        try:
            self.zero.step()
        finally:
            self.zero._join_config = config
