"""``zero``: joins a ``ZeroRedundancyOptimizer``, in stagereg's or torch's ``Join``.

A joined rank (a rank without data) owns a shard of the parameters that no other rank updates. Therefore it steps this
shard and takes part in the broadcasts. The step's gradients must already be in ``param.grad``: stagereg's ``ddp`` hook
stores them there, but torch's does not. In torch's ``Join``, list the ``ddp`` joinable before this one (``after=``).
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
    """Steps this rank's shard and takes part in the broadcasts, once per step of the ranks with data."""


@register("joinable", "zero")
class ZeroJoinable(BuiltInJoinable):
    """Joins a ``ZeroRedundancyOptimizer``: joined ranks continue to step their shards. Cannot be the first joinable.

    ``Join`` wraps a bare optimizer of this type automatically.

    Args:
        optimizer: the optimizer, without ``overlap_with_ddp``, which would step inside DDP's backward.
        after: the joinable of the model whose gradients the optimizer uses. Its ``no_sync`` steps are skipped.
            ``None``: the nearest such joinable before this one in the list of stagereg's ``Join``.
        hook: a hook to use instead of ``zero``.
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
        self.step = lambda: optimizer.step()  # resolved in each step, because a scheduler replaces the method
        self.after = after

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. Raises: ``JoinError`` if the optimizer steps inside DDP's backward."""
        if self.optimizer._overlap_with_ddp:
            raise JoinError(
                "a ZeroRedundancyOptimizer with overlap_with_ddp=True cannot be joined. Build the optimizer without "
                "overlap_with_ddp."
            )
        return super().join_hook(**kwargs)
