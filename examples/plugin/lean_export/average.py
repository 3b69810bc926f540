"""An exponential moving average of the weights of a module. Independent of ranks and of stagereg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["WeightAverage"]

_NARROW = (torch.float16, torch.bfloat16)


class WeightAverage:
    """Averages the tensors of a module's state dict, under the same names.

    After n updates, the next update has the weight ``1 - min(decay, (1 + n) / (10 + n))``, so that early weights soon
    lose influence. Averages of half-precision weights are in float32, so that small changes are not lost.

    Args:
        module: the module, plain, wrapped by ``DistributedDataParallel``, or sharded by ``fully_shard``: each rank
            averages its shards.
        decay: the factor of the old average in an update, at least 0 and below 1.
        buffers: ``"copy"``: copy buffers in each update; ``"average"``: average floating-point buffers, too.

    Attributes:
        updates: number of updates so far.
    """

    def __init__(self, module: nn.Module, decay: float = 0.999, buffers: Literal["copy", "average"] = "copy") -> None:
        self._module = module.module if isinstance(module, DistributedDataParallel) else module
        self._decay = decay
        self._buffers = buffers
        self.updates = 0
        copies: dict[int, torch.Tensor] = {}  # tied weights are one tensor under several names
        self._averages = {name: copies.setdefault(id(x), _copy(x)) for name, x in self._live().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the module's current weights to the average. Call after the optimizer's step."""
        keep = min(self._decay, (1 + self.updates) / (10 + self.updates))
        for average, x in self._pairs():
            if isinstance(x, nn.Parameter) or (self._buffers == "average" and average.is_floating_point()):
                average.lerp_(x.to(average.dtype), 1 - keep)
            else:
                average.copy_(x)
        self.updates += 1

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the averages under the names of the module's state dict: the tensors themselves, not copies."""
        return dict(self._averages)

    def buffers(self) -> list[torch.Tensor]:
        """Return the averages of the buffers."""
        return [average for average, x in self._pairs() if not isinstance(x, nn.Parameter)]

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Load the averages into another module of the same structure, or into the module itself."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        inner.load_state_dict(self._averages, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates."""
        return {"weights": self.weights(), "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: the names differ from the names of the module.
        """
        given: Mapping[str, torch.Tensor] = state["weights"]
        if given.keys() != self._averages.keys():
            differing = ", ".join(sorted(given.keys() ^ self._averages.keys()))
            raise ValueError(f"the average is of another module: only one of the two has {differing}")
        for name, average in self._averages.items():
            average.copy_(given[name])
        self.updates = int(state["updates"])

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each average once, with the tensor that it averages."""
        done: set[int] = set()
        for name, x in self._live().items():
            average = self._averages[name]
            if id(average) not in done:
                done.add(id(average))
                yield average, x

    def _live(self) -> dict[str, torch.Tensor]:
        state = self._module.state_dict(keep_vars=True)
        return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}


def _copy(x: torch.Tensor) -> torch.Tensor:
    copied = x.detach().clone()
    return copied.float() if copied.dtype in _NARROW else copied
