"""What becomes of the tier when a save of it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stagereg
from stagereg.checkpoint.tiers.near import NearCopies
from stagereg.checkpoint.tiers.part import SaveId
from stagereg.errors import CheckpointError


def test_a_save_that_cannot_begin_leaves_the_step_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = NearCopies.begin_save

    def begin_save(self: NearCopies, step: int) -> SaveId | None:
        if step == 2:
            raise CheckpointError("rank 1 ended")
        return begin(self, step)

    monkeypatch.setattr(NearCopies, "begin_save", begin_save)
    state = {"value": torch.tensor([1.0])}
    tier = stagereg.build("tier", "disk", dir=str(tmp_path), every=1, copies=0)

    def run() -> None:
        with stagereg.Checkpointer(None, tier=tier) as checkpointer:
            assert checkpointer.restore(state) is None
            for step in (1, 2):
                checkpointer.maybe_save(step, state)
                checkpointer.wait()

    with pytest.raises(CheckpointError, match="rank 1 ended"):
        run()
    state["value"].zero_()
    with stagereg.Checkpointer(None, tier=tier) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state["value"].item() == 1.0
