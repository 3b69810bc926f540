"""``joinable=ema``: an average of the weights that stays equal on all ranks, even with uneven inputs."""

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
    """Keeps an exponential moving average of a module's weights equal on all ranks of a join.

    List it after the optimizer, in stagereg's ``Join`` or in torch's. Ranks with data call :meth:`update` after each
    step of the optimizer. On ranks that have left a plain loop, the hook calls it; in ``join.iterate``, the loop body
    does so on all ranks.

    Args:
        module: the model: plain, in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        decay: the factor of the old average in an update, at least 0 and below 1; smaller in the first updates.
        buffers: ``copy``: copy buffers in each update; ``average``: average floating-point buffers, too.
        after: the joinable of the model, so that steps without a reduction (``no_sync``) do not update the average.
            ``None``: the nearest joinable of a model that is listed before this one.
        process_group: the ranks that train together; ``None``: the group of ``after``, or the default group.
        hook: a hook to use instead of its own hook.

    Attributes:
        average: the average itself.

    Raises:
        ConfigError: ``decay`` is not in this range.

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
            raise ConfigError(f"decay must be at least 0 and below 1, not {decay}. A usual value is 0.999.")
        self.average = WeightAverage(module, decay, buffers)
        self.after = after
        self.hook = hook
        self._group = process_group
        self._device = next((x.device for x in module.parameters()), torch.device("cpu"))

    def update(self) -> None:
        """Add the current weights to the average. Call after the optimizer's step, on ranks with data."""
        self.average.update()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the averages under the names of the module's state dict, for evaluation or export."""
        return self.average.weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates."""
        return self.average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Raises: ``ValueError`` if the names differ from the module's."""
        self.average.load_state_dict(state)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook. It uses no keyword arguments."""
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
