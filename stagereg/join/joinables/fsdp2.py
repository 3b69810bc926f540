"""``fsdp2``: a module sharded by ``fully_shard`` in a join, in stagereg's ``Join`` or in torch's.

``Join`` wraps a bare one in this by itself; name it where torch's ``Join`` is used, to pass it to ``step``, or where
ranks need an example of a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from stagereg.errors import JoinError
from stagereg.join.hooks.fsdp2 import Fsdp2Hook, device_of, group_of
from stagereg.join.joinable import Joinable, JoinConfig
from stagereg.registry import register

__all__ = ["Fsdp2Joinable"]


@register("joinable", "fsdp2")
class Fsdp2Joinable(Joinable):
    """Joins an FSDP2 module.

    Joined ranks run the module on empty inputs and end every step with the step's reduced gradients in their shards'
    ``grad``, so an optimizer that follows in the list of joinables keeps parameters and optimizer state right. The
    module's forward has to take tensors whose first dimension is 0. ``set_requires_gradient_sync`` is to be called
    before the forward, in the same steps on all ranks. In torch's ``Join``, make a new ``Join`` for each epoch.

    Args:
        module: the root module, to which ``fully_shard`` was applied last; the one that the loop calls.
        example: a batch for ranks that never have one, or whose batches cannot be emptied: a tuple of the module's
            arguments, or the only one. ``None``: ranks keep an empty version of their last inputs, and those that
            never had any take that of another rank.

    Keyword arguments of ``Join`` that it takes:
        divide_by_initial_world_size (bool): True (default): gradients are sums over the active ranks divided by the
            number of ranks, as FSDP2 does it; False: divided by the number of active ranks.

    Raises:
        JoinError: the module is no FSDP2 module, its mesh has several dimensions and not all ranks, or the example
            cannot be emptied.
    """

    def __init__(self, module: FSDPModule, example: Any = None) -> None:
        if not isinstance(module, FSDPModule):
            raise JoinError(
                f"the fsdp2 joinable needs a module to which torch.distributed.fsdp.fully_shard was applied, not a "
                f"{type(module).__name__}"
            )
        self.module = module
        self._example = example
        self._hook: Fsdp2Hook | None = None
        self._config: Any = JoinConfig.construct_disabled_join_config()
        self._group = group_of(module)

    @property
    def _join_config(self) -> Any:
        return self._config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._config = config
        if config.enable and self._hook is not None:
            self._hook.attach(self)

    def join_hook(self, **kwargs: Any) -> Fsdp2Hook:
        """Return the module's hook; it watches the module from the start of the join until :meth:`join_exit`."""
        self._hook = Fsdp2Hook(self.module, kwargs.get("divide_by_initial_world_size", True), self._example)
        return self._hook

    @property
    def unfinished(self) -> bool:
        """Whether a step of this rank has begun without a backward."""
        return self._hook is not None and self._hook.unfinished

    def counts(self, divide_by_initial_world_size: bool = True) -> bool:
        """Whether a step depends on which ranks are active: through the divisor."""
        return not divide_by_initial_world_size

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
        """The device on which the module's collectives run."""
        return device_of(self.module)

    @property
    def join_process_group(self) -> Any:
        """The process group of the module's mesh."""
        return self._group
