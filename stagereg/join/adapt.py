"""Turn what a user puts in a list of joinables into joinables.

Bare torch objects get the joinable that gives right numbers for them: DDP modules and ``ZeroRedundancyOptimizer`` s,
which torch knows, and sharded modules, optimizers, schedulers and functions, which it does not. Anything else with
torch's joinable methods is taken as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stagereg.errors import JoinError
from stagereg.join.joinables.ddp import DdpJoinable
from stagereg.join.joinables.fsdp2 import Fsdp2Joinable
from stagereg.join.joinables.module import ModuleJoinable
from stagereg.join.joinables.step import StepJoinable
from stagereg.join.joinables.zero import ZeroJoinable

__all__ = ["adapt"]

_METHODS = ("join_hook", "join_device", "join_process_group")


def adapt(objects: Sequence[Any]) -> list[Any]:
    """Return joinables for ``objects``, in their order, but those that lead first; each is told of what it follows.

    Raises:
        JoinError: an object cannot take part, or the first one cannot announce its rank.
    """
    listed = [_joinable(thing) for thing in objects]
    ahead = [joinable for joinable in listed if getattr(joinable, "leads", False)]
    joinables = [*ahead, *(joinable for joinable in listed if joinable not in ahead)]
    if all(getattr(joinable, "silent", False) for joinable in joinables[: len(ahead) + 1]):
        raise JoinError(
            f"the first joinable must announce its rank before each step, and a {type(objects[0]).__name__} does not; "
            "put the DDP module first: Join([model, optimizer])"
        )
    first: DdpJoinable | None = None
    model: Any = None
    for i, joinable in enumerate(joinables):
        if isinstance(joinable, DdpJoinable):
            joinable.leader, first = first, first or joinable
        if isinstance(joinable, (DdpJoinable, Fsdp2Joinable)):
            model = joinable
        elif hasattr(joinable, "after") and joinable.after is None:
            joinables[i] = joinable = copy.copy(joinable)  # the user's may be in other joins, after other modules
            joinable.after = model
    modules = [joinable.module for joinable in joinables if getattr(joinable, "module", None) is not None]
    for joinable in ahead:
        if joinable.module is None and modules:
            joinable.module = modules[0]
    return joinables


def _joinable(thing: Any) -> Any:
    if isinstance(thing, DistributedDataParallel):
        return DdpJoinable(thing)
    if isinstance(thing, FSDPModule):
        return Fsdp2Joinable(thing)
    if isinstance(thing, ZeroRedundancyOptimizer):
        return ZeroJoinable(thing)
    if all(hasattr(type(thing), name) or hasattr(thing, name) for name in _METHODS):
        return thing
    if isinstance(thing, FullyShardedDataParallel) or _is_sharded(thing):
        return ModuleJoinable(thing)
    if isinstance(thing, (Optimizer, LRScheduler)):
        return StepJoinable(thing.step)
    if callable(thing) and not hasattr(thing, "parameters"):
        return StepJoinable(thing)
    raise JoinError(
        f"a {type(thing).__name__} cannot take part in a join: it is no Joinable (join_hook, join_device, "
        "join_process_group), optimizer, scheduler or function. Wrap a module in DistributedDataParallel first; one "
        "that runs its collectives itself is stagereg.build('joinable', 'module', module=...), for join.iterate."
    )


def _is_sharded(thing: Any) -> bool:
    return isinstance(thing, nn.Module) and any(isinstance(param, DTensor) for param in thing.parameters())
