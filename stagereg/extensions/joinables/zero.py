"""``zero``: a ``ZeroRedundancyOptimizer``, in stagereg's ``Join`` or in torch's.

A joined rank owns a shard of the parameters that no other rank updates, so it steps that shard and takes part in the
broadcasts. Right numbers need the step's gradients in ``param.grad`` first; stagereg's ``ddp`` hook puts them there,
torch's does not: in torch's ``Join`` put the ``ddp`` joinable before it (``after=``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer

from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInJoinable, Joinable, JoinHook
from stagereg.join.kinds.step import StepHook
from stagereg.registry import register


@register("join_hook", "zero")
class ZeroHook(StepHook):
    """Steps this rank's shard, and takes part in the broadcasts, once per step of the active ranks."""


@register("joinable", "zero")
class ZeroJoinable(BuiltInJoinable):
    """Joins a ``ZeroRedundancyOptimizer``: joined ranks go on stepping the shard they own. It cannot be listed first.

    ``Join`` wraps a bare optimizer of that class in this by itself.

    Args:
        optimizer: the optimizer, without ``overlap_with_ddp``: its step would happen inside DDP's backward.
        after: the joinable of the model whose gradients it needs; ``no_sync`` steps are then left out. ``None``: the
            nearest one before it in the list of stagereg's ``Join``.
        hook: another hook in the place of ``zero``.
    """

    own_hook = ZeroHook
    may_be_first = False

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        after: Joinable | None = None,
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise JoinError(f"the zero joinable needs a ZeroRedundancyOptimizer, not a {type(optimizer).__name__}")
        super().__init__(hook, optimizer.join_process_group, optimizer.join_device, optimizer)
        self.optimizer = optimizer
        self.step = lambda: optimizer.step()  # looked up in each step: a scheduler replaces the method
        self.after = after

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. Raises: ``JoinError`` if the optimizer steps inside DDP's backward."""
        if self.optimizer._overlap_with_ddp:
            raise JoinError("a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be joined; build it without")
        return super().join_hook(**kwargs)
