"""An error of a save names the entry and its way out, from the first save on, and a check never fails a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

from stagereg.assembly import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks


class Failing:
    def state_dict(self) -> Any:
        raise ValueError("no state yet")

    def load_state_dict(self, state: Any) -> None: ...


STATES = {
    "storage": (
        lambda: {"a": {"b": torch._to_functional_tensor(torch.ones(2))}},
        r"'a\.b'.*its memory is inaccessible",
    ),
    "own": (lambda: {"mine": Failing()}, "'mine' cannot be saved: .*ValueError: no state yet"),
}


@pytest.mark.parametrize("kind", STATES)
def test_the_first_save_and_the_next_name_the_entry(kind: str, tmp_path: Path) -> None:
    make, text = STATES[kind]
    state = make()
    checkpointer = Checkpointer(tmp_path, every=1)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match=f"(?s)Step {step} was not saved: .*{text}"):
            checkpointer.save(step, state)


def partial(rank: int, world: int, folder: Path) -> str:
    x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (world,)), [Partial()])
    with pytest.raises(CheckpointError) as caught, Checkpointer(folder, every=1) as checkpointer:
        checkpointer.save(1, {"n": {"x": x}})
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_partial_tensor_is_named(world: int, tmp_path: Path) -> None:
    for text in run_ranks(partial, world, args=(tmp_path,)):
        assert "'n.x' cannot be saved: it is a DTensor of placements (Partial(sum),)" in text
