"""Converts the objects that a user lists in a join to joinables.

Each bare torch object gets a joinable that produces correct results for it. Any other object with the methods of
torch's joinables is used unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stagereg.errors import JoinError
from stagereg.join.joinable import BuiltInJoinable, Joinable, JoinHook, is_native, uncompiled
from stagereg.join.kinds.ddp import DdpJoinable
from stagereg.join.kinds.module import ModuleJoinable
from stagereg.join.kinds.step import StepJoinable
from stagereg.registry import build, register


class ForeignJoinable(BuiltInJoinable):
    """A joinable of torch, or an object with the same methods. It announces steps through torch's ``Join``."""

    announces_itself = True

    def __init__(self, joinable: Any, hook: Callable[..., JoinHook] | None = None) -> None:
        super().__init__(hook, joinable.join_process_group, joinable.join_device, joinable)
        self.joinable = joinable

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook that the user chose, or otherwise the hook of the object itself."""
        return self.joinable.join_hook(**kwargs) if self.hook is None else self.hook(self.joinable)


@register("joinable", "auto")
def auto(thing: Any, hook: Callable[..., JoinHook] | None = None) -> Joinable:
    """Return the joinable that ``Join`` uses for a bare object, such as ``ddp`` for a DDP module.

    Args:
        thing: a module, an optimizer, a scheduler, a function, or a joinable.
        hook: a hook to use instead of the joinable's own hook.
    """
    thing = uncompiled(thing)
    if isinstance(thing, DistributedDataParallel):
        return DdpJoinable(thing, hook)
    if isinstance(thing, FSDPModule):
        return build("joinable", "fsdp2", module=thing, hook=hook)
    if isinstance(thing, ZeroRedundancyOptimizer):
        return build("joinable", "zero", optimizer=thing, hook=hook)
    if is_native(thing):
        if hook is not None:
            thing.hook = hook
        return thing
    if all(hasattr(thing, name) for name in ("join_hook", "join_device", "join_process_group")):
        return ForeignJoinable(thing, hook)
    if isinstance(thing, nn.Module):
        is_sharded = any(isinstance(param, DTensor) for param in thing.parameters())
        # Launchers of several ranks set WORLD_SIZE.
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
        if is_sharded or isinstance(thing, FullyShardedDataParallel) or ranks == 1:
            return ModuleJoinable(thing, hook=hook)
    elif isinstance(thing, (Optimizer, LRScheduler)) or callable(thing):
        return StepJoinable(thing, hook=hook)
    raise JoinError(
        f"a {type(thing).__name__} cannot take part in a join: it is not a Joinable (join_hook, join_device, "
        "join_process_group), optimizer, scheduler or function. On several ranks, wrap a module in "
        "DistributedDataParallel first. For a module that runs its own collectives, pass stagereg.build('joinable', "
        "'module', module=...) and loop over join.iterate."
    )


def adapt(objects: Mapping[str, Any]) -> dict[str, Joinable]:
    """Convert each object to a joinable. Raises: ``JoinError`` if the first joinable cannot announce steps."""
    joinables = {name: auto(thing) for name, thing in objects.items()}
    name, first = next(iter(joinables.items()))
    if first.has_no_collectives or not first.may_be_first:
        raise JoinError(
            "the first joinable must signal before each step that its rank still has data, but a "
            f"{type(objects[name]).__name__} does not. Put the DDP module first: Join([model, optimizer])"
        )
    return joinables


def common_group(joinables: Sequence[Joinable]) -> Any:
    """Return the process group of the joinables. Raises: ``JoinError`` if their process groups differ."""
    in_groups = [each for each in joinables if not each.has_no_collectives]
    groups: list[Any] = [each.join_process_group or dist.group.WORLD for each in in_groups]
    if any(group != groups[0] for group in groups):
        raise JoinError("Using join context manager with multiple process groups")
    return groups[0]


def type_name(joinable: Joinable) -> str:
    """Return the type name of the object that the user passed to the join."""
    return type(joinable.joinable if isinstance(joinable, ForeignJoinable) else joinable).__name__
