"""Values that a program adds after its first save: ranks compare them as they compare those of the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stagereg import Checkpointer
from stagereg.errors import RankMismatchError
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
            except RankMismatchError as error:
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
            except RankMismatchError as error:
                refused.append(str(error))
    return refused


def test_a_value_that_another_rank_had_before_is_refused(tmp_path: Path) -> None:
    for refused in run_ranks(adding_later, 2, args=(str(tmp_path),)):
        first, second, third = refused
        assert "'x' is new on rank 1" in first
        assert "'x' is new on rank 1" in second
        assert "'x' is not the same on ranks 0, 1" in third
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000005"]


NAMES = {"plain": "'x'", "nested": "'aux.h.0'", "module": "'net.adapter.weight'", "optimizer": "exp_avg'", "buffer": ""}
"""What the error names of each kind; buffers of modules may differ."""


def adding_each(rank: int, world_size: int, root: str) -> dict[tuple[str, bool], str]:
    cases = [(kind, differs) for kind in NAMES for differs in (False, True)]
    return {case: adding(rank, world_size, f"{root}/{case[0]}-{case[1]}", *case) for case in cases}


def test_a_value_added_after_the_first_save_is_saved_if_it_is_the_same_and_else_refused_by_name(tmp_path: Path) -> None:
    for seen in run_ranks(adding_each, 2, args=(str(tmp_path),)):
        for (kind, differs), text in seen.items():
            refused = differs and NAMES[kind] != ""
            assert NAMES[kind] in text and "is not the same on ranks 0, 1" in text if refused else text == "", kind
            assert len([*tmp_path.glob(f"{kind}-{differs}/step-*")]) == (1 if refused else 3), kind
