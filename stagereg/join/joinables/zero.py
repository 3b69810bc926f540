"""``zero``: a ``ZeroRedundancyOptimizer`` in a join, in stagereg's ``Join`` or in torch's.

``Join`` wraps a bare optimizer of that class in this by itself. In torch's ``Join`` put the ``ddp`` joinable before it
(``after=``), since torch's own DDP hook leaves stale gradients behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from stagereg.errors import JoinError
from stagereg.join.hooks.zero import ZeroHook
from stagereg.join.joinable import Joinable
from stagereg.registry import register

__all__ = ["ZeroJoinable"]


@register("joinable", "zero")
class ZeroJoinable(Joinable):
    """Joins a ``ZeroRedundancyOptimizer``: joined ranks go on stepping the shard they own.

    Args:
        optimizer: the optimizer, without ``overlap_with_ddp``.
        after: the DDP module's joinable, whose gradients it needs; ``no_sync`` steps are then left out. ``Join`` fills
            it in with the nearest one before it in its list.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, after: Any = None) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise JoinError(f"the zero joinable needs a ZeroRedundancyOptimizer, not a {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.after = after

    @property
    def _join_config(self) -> Any:
        return self.optimizer._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.optimizer._join_config = config

    def join_hook(self, **kwargs: Any) -> ZeroHook:
        """Return the hook; takes no keyword arguments of its own."""
        return ZeroHook(self.optimizer, None if self.after is None else self.after.reduced)

    @property
    def join_device(self) -> torch.device:
        """The optimizer's default device."""
        return self.optimizer.join_device

    @property
    def join_process_group(self) -> Any:
        """The optimizer's process group."""
        return self.optimizer.join_process_group
