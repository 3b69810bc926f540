"""Tests of the average in joins: when ranks run out of data, it equals the average of a single process on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stagereg
import torch
from stagereg.testing import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from lean_export.joinable import EmaJoinable
from lean_export.joinable_contract import EmaContract, EmaHookContract

Result = tuple[dict[str, torch.Tensor], int]


class TestContract(EmaContract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


class TestHookContract(EmaHookContract):
    """Inherits the tests of the hook's contract."""


class Watching(nn.Module):
    """A model whose buffer depends on its rank's own batches."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x):
            self.seen.copy_(x.detach().sum())
        out: torch.Tensor = self.layer(x)
        return out


def data(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(10 + rank)
    return [torch.randn(4, 3) for _ in range(2 + 3 * rank)]  # 2 batches, 5


def build() -> tuple[Any, torch.optim.Optimizer, EmaJoinable]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Watching(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, stagereg.build("joinable", "ema", module=model, decay=0.5)


def step(model: Any, optimizer: torch.optim.Optimizer, ema: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    ema.update()


def plain_loop(rank: int, world: int) -> Result:
    model, optimizer, ema = build()
    with stagereg.Join([model, optimizer, ema]):
        for x in data(rank):
            step(model, optimizer, ema, lambda x=x: model(x).square().mean())  # type: ignore[misc]
    return ema.weights(), ema.average.updates


def iterated(rank: int, world: int) -> Result:
    model, optimizer, ema = build()
    join = stagereg.Join([model, optimizer, ema], average="world")
    with join:
        for x in join.iterate(data(rank)):
            step(model, optimizer, ema, lambda x=x: join.mean(model(x).square().sum(), len(x)))  # type: ignore[misc]
    return ema.weights(), ema.average.updates


def in_torchs_join(rank: int, world: int) -> Result:
    model, optimizer, ema = build()
    ddp = stagereg.build("joinable", "ddp", module=model)
    ema.after = ddp
    listed: list[Any] = [ddp, stagereg.build("joinable", "step", step=optimizer.step, after=ddp), ema]
    with TorchJoin(listed):
        for x in data(rank):
            step(model, optimizer, ema, lambda x=x: model(x).square().mean())  # type: ignore[misc]
    return ema.weights(), ema.average.updates


def accumulated(rank: int, world: int) -> Result:
    """Accumulate gradients over two batches; the average is updated when the optimizer steps."""
    model, optimizer, ema = build()
    with stagereg.Join([model, optimizer, ema]):
        for number, x in enumerate(data(rank)[:4], 1):
            if number % 2:
                with model.no_sync():
                    model(x).square().mean().backward()
                continue
            model(x).square().mean().backward()
            optimizer.step()
            ema.update()
            optimizer.zero_grad()
    return ema.weights(), ema.average.updates


def all_ways(rank: int, world: int) -> dict[str, Result]:
    return {way.__name__: way(rank, world) for way in (plain_loop, iterated, in_torchs_join, accumulated)}


def reference() -> dict[str, torch.Tensor]:
    """Return the average of one process whose step i uses the batches of all ranks that still have one."""
    torch.manual_seed(0)
    model = Watching()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ema = EmaJoinable(model, decay=0.5)
    ranks = [data(rank) for rank in range(2)]
    for i in range(5):
        batches = [batches[i] for batches in ranks if i < len(batches)]
        step(model, optimizer, ema, lambda b=batches: sum(model(x).square().mean() for x in b) / 2)  # type: ignore[misc]
    return ema.weights()


def test_averages_are_those_of_one_process_on_all_ranks_in_every_way_to_join() -> None:
    first, second = run_ranks(all_ways, 2)
    expected = reference()
    for way in ("plain_loop", "iterated", "in_torchs_join"):
        for weights, updates in (first[way], second[way]):
            assert updates == 5, way
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, msg=lambda text, way=way: f"{way}: {text}")  # type: ignore[misc]
    for way in first:
        assert first[way][1] == second[way][1], way
        for name, value in first[way][0].items():
            assert torch.equal(value, second[way][0][name]), (way, name)
    assert first["accumulated"][1] == 2
    assert first["plain_loop"][0]["seen"].item() != 0.0
