"""An error of a save names the entry and its way out, from the first save on, and a check never fails a save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

import stagereg.extensions.diagnostics.first_save as first_save
from stagereg.assembly import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.testing import run_ranks


class Failing:
    def state_dict(self) -> Any:
        raise ValueError("no state yet")

    def load_state_dict(self, state: Any) -> None: ...


STATES = {
    "storage": (lambda: {"a": {"b": torch._to_functional_tensor(torch.ones(2))}}, r"'a\.b'.*cannot be reached"),
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


@pytest.mark.parametrize(
    ("module", "name"),
    [(first_save, "leaves"), (first_save, "memory_of"), (first_save, "listed"), (first_save, "_variables")],
)
def test_a_check_that_fails_is_skipped_and_the_save_is_the_same(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a check that fails")

    monkeypatch.setattr(module, name, fails)
    monkeypatch.setattr(first_save.TensorKind, "fits", fails if name == "listed" else first_save.TensorKind.fits)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.DEBUG, logger="stagereg"), Checkpointer(tmp_path, every=1) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer, "n": 1})
    assert [each for each in caplog.records if "skipped the check" in each.getMessage()]
    monkeypatch.undo()
    other = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"model": other, "optimizer": torch.optim.SGD(other.parameters()), "n": 0}) == 1
    assert torch.equal(other.weight, model.weight)
