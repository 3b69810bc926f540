"""``ddp``: a ``DistributedDataParallel`` module in a join, in stagereg's ``Join`` or in torch's.

``Join`` wraps a bare DDP module in this by itself; name it where torch's ``Join`` is used, or to pass it to ``step`` or
``zero``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import JoinError
from stagereg.join.hooks.ddp import CarryWatch, DdpHook, reset_divisor
from stagereg.join.protocol import Joinable
from stagereg.registry import register

__all__ = ["DdpJoinable"]

_DIVISOR = "_divide_by_initial_world_size"


@register("joinable", "ddp")
class DdpJoinable(Joinable):
    """Joins a DDP module.

    Joined ranks end every step with the step's reduced gradients in ``param.grad``, so an optimizer that follows in the
    list of joinables keeps parameters and optimizer state equal on all ranks.

    Args:
        module: the DDP module.

    Keyword arguments of ``Join`` that it takes:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            world size; False: divided by the number of active ranks.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        if not isinstance(module, DistributedDataParallel):
            raise JoinError(f"the ddp joinable needs a DistributedDataParallel module, not a {type(module).__name__}")
        self.module = module
        self._hook: DdpHook | None = None
        self._carry: CarryWatch | None = None
        self._divisor: bool | None = None

    @property
    def _join_config(self) -> Any:
        return self.module._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:  # DDP's own forward announces, and reads the configuration there
        self.module._join_config = config

    def join_hook(self, **kwargs: Any) -> DdpHook:
        """Return the module's hook; it watches the module from now until :meth:`join_exit`."""
        if self._carry is None:
            self._divisor = getattr(self.module, _DIVISOR, None)
            self._carry = CarryWatch(self.module)
        self._hook = DdpHook(self.module, kwargs.get("divide_by_initial_world_size", True), self._carry)
        return self._hook

    def reduced(self) -> bool:
        """Whether the last shadowed step ended with reduced gradients, so that optimizers are to step."""
        return self._hook is not None and self._hook.reduced

    def divide_by(self, work: dist.Work) -> None:
        """Have the next backward divide by the active ranks' number, in ``work``, unless the world size is wanted."""
        self.module.reducer._set_forward_pass_work_handle(work, getattr(self.module, _DIVISOR))

    def join_exit(self) -> None:
        """Stop watching, and restore the module's divisor."""
        if self._carry is None:
            return
        self._carry.remove()
        self._carry = None
        reset_divisor(self.module)
        if self._divisor is not None:
            setattr(self.module, _DIVISOR, self._divisor)
        elif hasattr(self.module, _DIVISOR):
            delattr(self.module, _DIVISOR)

    @property
    def join_device(self) -> torch.device:
        """The module's device."""
        return self.module.join_device

    @property
    def join_process_group(self) -> Any:
        """The module's process group."""
        return self.module.join_process_group
