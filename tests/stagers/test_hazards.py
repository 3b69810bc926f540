"""Known ways to lose a checkpoint silently, which are absent here; crashes are in ``tests/checkpoint/kills``."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.errors import CheckpointError
from stagereg.stagers.async_stager import AsyncStager


class FailsToStage(AsyncStager):
    """Returns a future that has failed already."""

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(RuntimeError("out of memory"))
        return failed


def test_a_failed_staging_raises_where_training_is(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path), stager=FailsToStage())
    with pytest.raises(CheckpointError, match="out of memory"):
        checkpointer.save(1, {"w": torch.ones(2)})
    checkpointer.close()
    assert checkpointer.latest is None


def test_the_last_of_two_saves_of_a_step_is_whole(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(9000)})
        checkpointer.save(1, {"b": torch.ones(5)})
        checkpointer.wait()
        found = {"b": torch.zeros(5)}
        assert checkpointer.restore(found) == 1
        assert found["b"].eq(1).all()
