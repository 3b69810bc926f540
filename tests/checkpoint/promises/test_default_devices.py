"""Saves and restores under torch's defaults for devices and dtypes; ``meta`` stands for an accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import build
from stagereg.assembly import Checkpointer
from stagereg.testing import run_ranks

DEFAULTS: dict[str, Callable[[], object]] = {
    "meta": lambda: torch.set_default_device("meta"),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "DoubleTensor": lambda: torch.set_default_tensor_type(torch.DoubleTensor),
}
STAGERS = ("overlapped", "pinned_cached", "blocking")


def states(value: float) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.float32), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.full((4, 3), value)).sum().backward()
    optimizer.step()
    numbers = {"z": torch.full((70000,), value, dtype=torch.float16), "t": torch.full((5, 4), value).t(), "v": value}
    return {"model": model, "optimizer": optimizer, "numbers": numbers}


def saves(rank: int, world: int, folder: Path, default: str) -> list[str]:
    warnings.simplefilter("ignore")
    wrong = []
    saved, targets = states(5.0), {stager: states(0.0) for stager in STAGERS}
    before = torch.get_default_dtype()
    DEFAULTS[default]()
    try:
        for stager, restored in targets.items():
            for step in (1, 2):  # the second finds what the first has kept
                with Checkpointer(folder / stager, every=1, stager=build("stager", stager)) as checkpointer:
                    checkpointer.save(step, saved)
            with Checkpointer(folder / stager, every=1) as checkpointer:
                if checkpointer.restore(restored) != 2:
                    wrong.append(f"{stager}: no step")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    for stager, restored in targets.items():
        for name in saved:
            these, those = (values(each[name]) for each in (saved, restored))
            if any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(these, those, strict=True)):
                wrong.append(f"{stager}: {name}")
    return wrong


def values(x: Any) -> list[torch.Tensor]:
    state = x if isinstance(x, dict) else x.state_dict()
    leaves = torch.utils._pytree.tree_leaves(state)
    return [each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in leaves if each is not None]


@pytest.mark.parametrize(("default", "world"), [("bfloat16", 1), ("DoubleTensor", 1), ("meta", 2)])
def test_a_state_comes_back_as_it_was_saved(default: str, world: int, tmp_path: Path) -> None:
    assert run_ranks(saves, world, args=(tmp_path, default), timeout_s=90) == [[]] * world
