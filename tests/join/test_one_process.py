"""A program that wraps its model in DDP only if it has several ranks runs as one process with the same lines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import stagereg
from stagereg.errors import JoinError
from stagereg.testing import run_ranks

from ..support.reference import JOINABLES

BATCHES = [torch.arange(8.0).reshape(2, 4) / 8 + step for step in range(3)]
WAYS = [*itertools.product((True, False), (None, "counted", "planned", "torch"), (True, False), (True, False))]
"""Whether the loop uses ``iterate``, the mode, whether the join throws, and whether it divides by the world size."""


def train(way: Any) -> list[list[float]]:
    """The weights after each step, and the metric at the end; ``way`` is ``None`` for a loop without a join."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = [stagereg.build("joinable", "metrics")] if JOINABLES else []
    found = []

    def step(batch: torch.Tensor, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for each in metrics:
            each.add(loss=(loss.detach(), len(batch)))
        found.append(model.weight.flatten().tolist())

    if way is None:
        for batch in BATCHES:
            step(batch, model(batch).square().mean())
        return [*found, *([each.compute()["loss"]] for each in metrics)]
    iterates, mode, throws, divides = way
    options = {
        "mode": mode,
        "loader": BATCHES,
        "throw_on_early_termination": throws,
        "divide_by_initial_world_size": divides,
    }
    with stagereg.Join([model, optimizer, *metrics], **options) as join:
        for batch in join.iterate(BATCHES) if iterates else BATCHES:
            loss = model(batch).square()
            step(batch, join.mean(loss.sum(), len(batch)))
    return [*found, *([each.compute()["loss"]] for each in metrics)]


def on_one_rank(rank: int, world_size: int) -> list[Any]:
    return [train(way) for way in WAYS]


def test_a_join_of_a_plain_module_changes_nothing() -> None:
    expected = train(None)
    assert [train(way) for way in WAYS] == [expected] * len(WAYS)
    assert run_ranks(on_one_rank, 1) == [[expected] * len(WAYS)]


WRAP = "On several ranks, wrap a module in DistributedDataParallel first"


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(JoinError) as error:
        stagereg.Join([nn.Linear(1, 1)])
    return str(error.value)


def test_ranks_that_would_train_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(WRAP in text for text in run_ranks(refused, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launcher, whose ranks have not made their process group yet
    assert WRAP in refused(0, 1)
