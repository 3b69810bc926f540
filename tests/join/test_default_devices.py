"""Joins of programs that set torch's defaults for devices and dtypes.

``meta`` stands for an accelerator; torch's DDP itself works under it when the batches are made on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from stagereg import Join
from stagereg.errors import UnevenInputsError
from stagereg.testing import run_ranks

DEFAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "meta": lambda: torch.set_default_device("meta"),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "DoubleTensor": lambda: torch.set_default_tensor_type(torch.DoubleTensor),
}


def train(rank: int, world: int, default: str) -> list[Any]:
    found: list[Any] = []
    for way in ("plain", "throws", "iterate", "torch"):
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [torch.full((2, 2), rank + step + 1.0) for step in range(2 + rank)]
        DEFAULTS[default]()
        options: dict[str, Any] = {"throw_on_early_termination": True} if way == "throws" else {}
        if way == "torch":
            options["mode"] = "torch"
        losses, ended = [], ""
        try:
            with Join([model], **options) as join:
                for x in join.iterate(batches) if way == "iterate" else batches:
                    loss = model(x).sum()
                    if way == "iterate":
                        loss = join.mean(loss, len(x))
                        losses.append(loss.item())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        except UnevenInputsError as error:
            ended = type(error).__name__
        found.append((way, losses, ended, model.module.weight.tolist()))
    return found


@pytest.mark.parametrize("default", [name for name in DEFAULTS if name != "none"])
def test_a_join_gives_the_same_numbers(default: str) -> None:
    assert run_ranks(train, 2, args=(default,), timeout_s=60) == _plain()


_expected: list[Any] = []


def _plain() -> list[Any]:
    if not _expected:
        _expected.extend(run_ranks(train, 2, args=("none",), timeout_s=60))
    return _expected
