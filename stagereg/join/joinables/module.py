"""``module``: any module whose ranks run its collectives by themselves: FSDP1, tensor parallelism, layers of one's own.

There is no way to take part in its steps but to run them, so it can be joined where the loop body runs on all ranks: by
``join.iterate``. ``Join`` wraps ``FullyShardedDataParallel`` modules, and modules with ``DTensor`` parameters, in this
by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stagereg.errors import JoinError
from stagereg.join.hooks.module import ModuleHook
from stagereg.join.joinable import Joinable, notify
from stagereg.join.step_tracker import Announcer
from stagereg.registry import register

__all__ = ["ModuleJoinable"]


@register("joinable", "module")
class ModuleJoinable(Joinable):
    """Joins a module of any kind, for ``join.iterate`` only. A step begins with the module's forward.

    Args:
        module: the module that the loop body calls.
        process_group: the ranks that train it together; ``None``: that of an FSDP1 module, or else the default group.
        device: of the group's collectives.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        self._announcer: Announcer | None = None
        super().__init__()
        if not isinstance(module, nn.Module):
            raise JoinError(f"the module joinable needs a torch.nn.Module, not a {type(module).__name__}")
        self.module = module
        self._group = process_group
        self._device = torch.device(device)

    @property
    def _join_config(self) -> Any:
        return self._config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._config = config
        self.join_exit()
        if config.enable:
            self._announcer = Announcer(self.module, self._begin, expects=self._expects)

    def join_hook(self, **kwargs: Any) -> ModuleHook:
        """Return the hook. Raises: ``JoinError`` if gradients are not to be divided by the world size."""
        if not kwargs.get("divide_by_initial_world_size", True):
            raise JoinError(
                f"a {type(self.module).__name__} divides its gradients by the world size itself, so "
                "divide_by_initial_world_size=False cannot be had; use join.mean(loss_sum, n, over='active')."
            )
        return ModuleHook(self.module)

    def join_exit(self) -> None:
        """Stop watching."""
        if self._announcer is not None:
            self._announcer.remove()
            self._announcer = None

    @property
    def unfinished(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self._announcer is not None and self._announcer.open

    @property
    def join_device(self) -> torch.device:
        """The device of the group's collectives."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks that train the module together."""
        if self._group is not None:
            return self._group
        return getattr(self.module, "process_group", None) or dist.group.WORLD

    def _expects(self) -> bool:
        membership = getattr(self._join_config, "membership", None)
        return membership is not None and bool(membership.expected)

    def _begin(self) -> None:
        notify(self)
