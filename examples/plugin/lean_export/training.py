"""A small training that the contracts of joinables and hooks play: a model learns to answer a batch with its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Training"]


class Training:
    """Trains a linear model by SGD with momentum.

    Args:
        world_size: of the training that one process stands for, by which it divides gradients; ``None`` on a rank,
            where DDP does that.
    """

    def __init__(self, world_size: int | None = None) -> None:
        torch.manual_seed(0)
        module = nn.Linear(2, 1).double()
        self.world_size = world_size
        self.model: Any = module if world_size else DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, values: Sequence[float]) -> None:
        """Learn from the batches that some values stand for."""
        self.optimizer.zero_grad()
        x = torch.tensor([[value, value * value] for value in values], dtype=torch.float64)
        losses = (self.model(x) - x[:, :1]).square()
        (losses.sum() / (self.world_size or 1)).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what is to be equal on all ranks: the weights."""
        return {name.removeprefix("module."): each.detach() for name, each in self.model.named_parameters()}
