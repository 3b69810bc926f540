"""Plans are reused from one checkpoint to the next only while they fit the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlanner

import stagereg
import stagereg.checkpoint.torchfiles as torchfiles
from stagereg import Checkpointer
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.errors import CheckpointError

STATES: list[dict[str, Any]] = [
    {"w": torch.ones(3), "n": 1},
    {"w": torch.full((3,), 2.0), "n": 2},
    {"w": torch.full((5,), 3.0), "n": 3, "more": torch.zeros(2)},
    {"w": torch.full((5,), 4.0).double(), "n": 4},
    {"n": 5},
]


@pytest.mark.parametrize("storage", ["dcp", "direct"])
def test_checkpoints_are_right_when_the_state_changes(storage: str, tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), keep=9, storage=stagereg.build("storage", storage)) as checkpointer:
        for step, state in enumerate(STATES):
            checkpointer.save(step, dict(state))
    for step, state in enumerate(STATES):
        found: dict[str, Any] = dict.fromkeys(state)
        with Checkpointer(str(tmp_path), resume=str(tmp_path / f"step-{step:08d}")) as reader:
            assert reader.restore(found) == step
        for name, x in state.items():
            assert torch.equal(found[name], x) if isinstance(x, torch.Tensor) else found[name] == x


def test_after_a_failed_save_plans_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
        checkpointer.wait()
        key = checkpointer._target.plans._key
        assert key in SavePlanner._cached_save_plan
        with monkeypatch.context() as patch:
            patch.setattr(DcpStorage, "write_data", fail)
            checkpointer.save(2, {"w": torch.ones(3)})
            with pytest.raises(CheckpointError, match="disk full"):
                checkpointer.wait()
        assert key not in SavePlanner._cached_save_plan
        checkpointer.save(3, {"w": torch.ones(3)})
    assert checkpointer.latest == tmp_path / "step-00000003"
    assert key not in SavePlanner._cached_metadata
    assert torchfiles.Plans()._key != key
