"""A small training run for the contracts of joinables and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Training"]


class Training:
    """Trains a linear model with SGD and momentum, to predict the value that determines each batch.

    Args:
        world_size: the world size by which a single process divides its gradients, to compute the expected result;
            ``None`` on a rank, where DDP divides them.
    """

    def __init__(self, world_size: int | None = None) -> None:
        torch.manual_seed(0)
        module = nn.Linear(2, 1).double()
        self.world_size = world_size
        self.model: Any = module if world_size else DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, values: Sequence[float]) -> None:
        """Take one training step on the batches that ``values`` determine."""
        self.optimizer.zero_grad()
        x = torch.tensor([[value, value * value] for value in values], dtype=torch.float64)
        losses = (self.model(x) - x[:, :1]).square()
        (losses.sum() / (self.world_size or 1)).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the weights, which must be equal on all ranks."""
        return {name.removeprefix("module."): each.detach() for name, each in self.model.named_parameters()}
