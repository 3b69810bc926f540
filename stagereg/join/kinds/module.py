"""``module``: a module whose collectives only the loop body can run: FSDP1, tensor parallelism, or custom layers.

A rank outside the loop cannot take part in these collectives, so such a module supports only ``join.iterate``. ``Join``
wraps ``FullyShardedDataParallel`` modules, and modules with ``DTensor`` parameters, in this joinable automatically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from stagereg.base.option_text import option
from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInHook, JoinHook, uncompiled
from stagereg.join.tracked import TrackedJoinable
from stagereg.registry import register


@register("join_hook", "module")
class ModuleHook(BuiltInHook["ModuleJoinable"]):
    """Raises ``JoinError``, because only the loop body can run the collectives of the module."""

    def main_hook(self) -> None:
        """Raise ``JoinError``: this rank has left a loop that other ranks continue."""
        raise JoinError(
            "this rank has left the loop while other ranks continue, but only the loop body can take part in the steps "
            f"of a {type(self.joinable.module).__name__}. Loop over join.iterate(loader), which runs the body on all "
            "ranks, and leave the loop on all ranks at the same step."
        )


@register("joinable", "module")
class ModuleJoinable(TrackedJoinable):
    """Joins a module of any kind, for ``join.iterate`` only. A step begins with the module's forward.

    Args:
        module: the module that the loop body calls.
        process_group: the ranks that train the module together. ``None``: FSDP1's group, or the default group.
        device: the device of the process group's collectives.
        hook: a hook to use instead of :class:`ModuleHook`, if it can take part in the steps of continuing ranks.
    """

    own_hook = ModuleHook
    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        device: str = "cpu",
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise JoinError(f"the module joinable needs a torch.nn.Module, not a {type(module).__name__}")
        module = uncompiled(module)
        own = module.process_group if isinstance(module, FullyShardedDataParallel) else None
        super().__init__(hook, process_group or own, device)
        self.module = module
        is_sharded = any(isinstance(param, DTensor) for param in module.parameters())
        self.gathers = is_sharded or any(isinstance(part, FullyShardedDataParallel) for part in module.modules())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. Raises: ``JoinError`` if the join divides gradients by the number of active ranks."""
        several = dist.get_world_size(self.join_process_group) > 1
        if not kwargs.get("divide_by_initial_world_size", True) and several:
            raise JoinError(
                f"a {type(self.module).__name__} divides its gradients by the world size itself, so "
                f"{option('join.divide_by_initial_world_size', False)} is unsupported. Use join.mean(loss_sum, n, "
                "over='active')."
            )
        return super().join_hook(**kwargs)
