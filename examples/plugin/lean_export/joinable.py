"""``joinable=ema``: an average of the weights that is equal on all ranks, also on uneven inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from stagereg.plugin import ConfigError, Joinable, JoinHook
from torch import nn

from lean_export.average import WeightAverage
from lean_export.hook import EmaHook

__all__ = ["EmaJoinable"]


class EmaJoinable(Joinable):
    """Keeps an exponential moving average of a module's weights, and joins it.

    List it after the optimizer, in stagereg's ``Join`` or in torch's; it announces nothing. Ranks with data call
    :meth:`update` after each step of the optimizer; ranks that have left a plain loop do so by the hook. In
    ``join.iterate`` all ranks run the same line.

    Args:
        module: the model: plain, in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        decay: from 0 on and below 1; what is left of the average at an update. The first updates count for more.
        buffers: whether buffers are those of the last update (``copy``) or averaged as well (``average``).
        after: the joinable of the model, so that nothing is updated in steps without a reduction (``no_sync``).
            ``None``: the nearest one listed before it.
        process_group: the ranks that train together; ``None``: those of ``after``, or the default group.
        hook: another hook in the place of its own.

    Attributes:
        average: the average itself.

    Raises:
        ConfigError: ``decay`` is no such number.

    Example::

        ema = stagereg.build("joinable", "ema", module=model, decay=0.99)
        state = {"model": model, "optimizer": optimizer, "ema": ema}
        with stagereg.Join([model, optimizer, ema]) as join:
            for x, y in join.iterate(loader):
                ...
                optimizer.step()
                ema.update()
                checkpointer.maybe_save(step, state)
    """

    has_no_collectives = True

    def __init__(
        self,
        module: nn.Module,
        decay: float = 0.999,
        buffers: Literal["copy", "average"] = "copy",
        after: Joinable | None = None,
        process_group: dist.ProcessGroup | None = None,
        hook: Callable[..., JoinHook] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ConfigError(f"decay must be at least 0 and below 1, not {decay}: 0.999 is a usual value")
        self.average = WeightAverage(module, decay, buffers)
        self.after = after
        self.hook = hook
        self._group = process_group
        self._device = next((x.device for x in module.parameters()), torch.device("cpu"))

    def update(self) -> None:
        """Take the weights in; after the optimizer's step, on ranks with data."""
        self.average.update()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the averages under the names of the module's state dict, to be evaluated or exported."""
        return self.average.weights()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return self.average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Raises: ``ValueError`` if it is of another module."""
        self.average.load_state_dict(state)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook; takes no keyword arguments of its own."""
        return self.make_hook(EmaHook)

    @property
    def join_device(self) -> torch.device:
        """The device of the weights."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks that train together."""
        if self._group is not None:
            return self._group
        return dist.group.WORLD if self.after is None else self.after.join_process_group
