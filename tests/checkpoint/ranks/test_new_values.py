"""Values that a program adds after its first save: ranks compare them as they compare those of the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import Checkpointer
from stagereg.errors import DisagreementError
from stagereg.testing import run_ranks


def added(kind: str, x: torch.Tensor, state: dict[str, Any], net: torch.nn.Module) -> None:
    """Add ``x`` to the state."""
    if kind == "plain":
        state["x"] = x
    elif kind == "nested":
        state["aux"] = {"h": [x]}
    elif kind == "module":
        net.add_module("adapter", torch.nn.Linear(1, len(x), bias=False))
        net.adapter.weight.data[:, 0] = x  # type: ignore[union-attr,index]
    elif kind == "buffer":
        net.register_buffer("seen", x)
    else:
        optimizer = state["optimizer"]
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for moments in optimizer.state.values():
            moments["exp_avg"].fill_(x[0])


def adding(rank: int, world_size: int, root: str, kind: str, differs: bool) -> str:
    """Save three times, and add a value before the second save; return the message of a refusal."""
    net = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(net.weight)
    torch.nn.init.ones_(net.bias)
    state = {"net": net, "optimizer": torch.optim.Adam(net.parameters())}
    size = 5 + rank if differs and kind == "plain" else 5  # another shape is a difference too
    with Checkpointer(root, every=1, keep=9) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        added(kind, torch.full((size,), float(rank if differs else 7)), state, net)
        for step in (2, 3):
            try:
                checkpointer.save(step, state)
                checkpointer.wait()
            except DisagreementError as error:
                return str(error)
    return ""


def adding_later(rank: int, world_size: int, root: str) -> list[str]:
    """Save a value that rank 0 has from the beginning, and rank 1 from the second save on; return the refusals."""
    state: dict[str, Any] = {"y": torch.zeros(3)} | ({"x": torch.zeros(3)} if rank == 0 else {})
    refused = []
    with Checkpointer(root, every=1, keep=9) as checkpointer:
        for step in (1, 2, 3, 4, 5):
            if step > 1 and rank == 1:
                state["x"] = torch.full((3,), float(step < 5))
            try:
                checkpointer.save(step, state)
                checkpointer.wait()
            except DisagreementError as error:
                refused.append(str(error))
    return refused


def test_a_value_that_another_rank_had_before_is_refused(tmp_path: Path) -> None:
    for refused in run_ranks(adding_later, 2, args=(str(tmp_path),)):
        first, second, third = refused
        assert "'x' is new on rank 1" in first
        assert "'x' is new on rank 1" in second
        assert "'x' is not the same on ranks 0, 1" in third
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000005"]


@pytest.mark.parametrize("kind", ["plain", "nested", "module", "optimizer", "buffer"])
def test_a_value_added_after_the_first_save_that_differs_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name = {"plain": "'x'", "nested": "'aux.h.0'", "module": "'net.adapter.weight'", "optimizer": "exp_avg'"}.get(kind)
    seen = run_ranks(adding, 2, args=(str(tmp_path), kind, True))
    if name is None:  # buffers of modules may differ
        assert seen == ["", ""]
    else:
        assert all(name in text and "is not the same on ranks 0, 1" in text for text in seen), seen
        assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000001"]


@pytest.mark.parametrize("kind", ["plain", "nested", "module", "optimizer"])
def test_a_value_added_after_the_first_save_that_is_the_same_is_saved(kind: str, tmp_path: Path) -> None:
    assert run_ranks(adding, 2, args=(str(tmp_path), kind, False)) == ["", ""]
    assert len([*tmp_path.glob("step-*")]) == 3
