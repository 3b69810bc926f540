"""With every stager and every storage, a checkpoint has the state at the call of ``save``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg
from stagereg import Checkpointer

STORAGES = ["dcp", "safetensors"]
STAGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocking": ("blocking", {}),
    "pinned_cached": ("pinned_cached", {}),
    "overlapped": ("overlapped", {}),
    "shared": ("shared", {}),
    "incremental": ("incremental", {"detect": "content"}),
    "incremental_frozen": ("incremental", {"frozen": ["model.base.*"]}),
    "bounded": ("pinned_cached", {"host_memory_gb": 2**-12}),
}
SAVES = 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(200, 200).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(200)
        self.head = torch.nn.Linear(200, 200)
        self.tied = torch.nn.Linear(200, 200, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.head(self.norm(self.base(x))))


def things() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "seen": 0,
    }


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(8, 200)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["schedule"].step()
    state["seen"] += 8


def picture(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: x.state_dict() if hasattr(x, "state_dict") else x for name, x in state.items()})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("stager", STAGERS)
def test_a_checkpoint_is_of_its_step_while_training_goes_on(stager: str, storage: str, tmp_path: Path) -> None:
    if storage == "safetensors":
        pytest.importorskip("safetensors")
    name, options = STAGERS[stager]
    state = things()
    train(state)
    pictures = {}
    checkpointer = Checkpointer(
        str(tmp_path),
        keep=SAVES,
        stager=stagereg.build("stager", name, **options),
        storage=stagereg.build("storage", storage),
    )
    with checkpointer:
        for step in range(SAVES):
            pictures[step] = picture(state)
            checkpointer.save(step, state)
            for _ in range(2):
                train(state)
    for step, expected in pictures.items():
        fresh = things()
        with Checkpointer(str(tmp_path), resume=str(tmp_path / f"step-{step:08d}")) as reader:
            assert reader.restore(fresh) == step
        assert equal(picture(fresh), expected), step


def test_the_checkpointer_releases_its_copies_as_promised(tmp_path: Path) -> None:
    class Recording(type(stagereg.build("stager", "pinned_cached"))):  # type: ignore[misc]
        def release(self, staged: dict[str, Any]) -> None:
            released.append(bool(staged))
            super().release(staged)
            in_flight.append(self._copier.pool.in_flight)

    released: list[bool] = []
    in_flight: list[int] = []
    stager = Recording()
    with Checkpointer(str(tmp_path), stager=stager) as checkpointer:
        assert stager._copier.pool.readers_release
        for step in range(3):
            checkpointer.save(step, {"x": torch.full((1000,), float(step))})
            checkpointer.wait()
    assert released == [True] * 3
    assert in_flight == [0] * 3
