"""What the joinables of this extension refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import stagereg
from stagereg.errors import JoinError
from stagereg.testing import run_ranks


def test_zero_refuses_another_optimizer() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(JoinError, match="needs a ZeroRedundancyOptimizer"):
        stagereg.build("joinable", "zero", optimizer=sgd)


def first(rank: int, world_size: int) -> str:
    """The error of a sharded optimizer that is listed first."""
    optimizer: Any = ZeroRedundancyOptimizer(nn.Linear(1, 1).parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(JoinError) as error:
        stagereg.Join([optimizer])
    return str(error.value)


def test_a_sharded_optimizer_cannot_be_listed_first() -> None:
    for text in run_ranks(first, 2, timeout_s=30):
        assert "a ZeroRedundancyOptimizer does not. Put the DDP module first" in text
