"""``ddp``: a ``DistributedDataParallel`` module in a join, in stagereg's ``Join`` or in torch's.

``Join`` wraps a bare DDP module in this by itself; name it where torch's ``Join`` is used, or to pass it to ``step`` or
``zero``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.hooks.ddp import DdpHook
from stagereg.join.joinable import Joinable
from stagereg.join.pace import Pace
from stagereg.registry import register

__all__ = ["DdpJoinable"]


@register("joinable", "ddp")
class DdpJoinable(Joinable):
    """Joins a DDP module.

    Joined ranks end every step with the step's reduced gradients in ``param.grad``, so an optimizer that follows in the
    list of joinables keeps parameters and optimizer state equal on all ranks.

    Args:
        module: the DDP module.

    Attributes:
        leader: the first joinable of the join, where that is another DDP module; ``Join`` fills it in.

    Keyword arguments of ``Join`` that it takes:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            world size; False: divided by the number of active ranks.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        if not isinstance(module, DistributedDataParallel):
            raise JoinError(f"the ddp joinable needs a DistributedDataParallel module, not a {type(module).__name__}")
        self.module = module
        self.leader: DdpJoinable | None = None
        self._hook: DdpHook | None = None

    @property
    def _join_config(self) -> Any:
        return self.module._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:  # DDP's own forward announces, and reads the configuration there
        self.module._join_config = config
        if config.enable and self._hook is not None:
            self._hook.attach()
            if self.leader is not None and self._hook.pace is not None:
                self._hook.pace.leader = self.leader.pace

    def join_hook(self, **kwargs: Any) -> DdpHook:
        """Return the module's hook; it watches the module from the start of the join until :meth:`join_exit`."""
        self._hook = DdpHook(self.module, kwargs.get("divide_by_initial_world_size", True))
        return self._hook

    @property
    def pace(self) -> Pace | None:
        """Where the module's steps begin, while it is in a join."""
        return None if self._hook is None else self._hook.pace

    @property
    def unfinished(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self.pace is not None and self.pace.unfinished

    def counts(self, divide_by_initial_world_size: bool = True) -> bool:
        """Whether a step depends on which ranks are active: through the divisor, or through buffers that are shared."""
        shares = self.module.forward_sync_buffers and any(True for _ in self.module.module.buffers())
        return shares or not divide_by_initial_world_size

    def reduced(self) -> bool:
        """Whether the last shadowed step ended with reduced gradients, so that optimizers are to step."""
        return self._hook is not None and self._hook.reduced

    def join_exit(self) -> None:
        """Stop watching, and restore the module's divisor."""
        if self._hook is not None:
            self._hook.detach()
            self._hook = None

    @property
    def join_device(self) -> torch.device:
        """The module's device."""
        return self.module.join_device

    @property
    def join_process_group(self) -> Any:
        """The module's process group."""
        return self.module.join_process_group
