"""Which checkpoint a run goes on from: none is passed over of which it is not known that it is bad."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Leave
from stagereg.checkpoint.store.directory import Directory
from stagereg.errors import CheckpointError


def test_one_that_cannot_be_looked_at_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(str(tmp_path), leave=Leave(save_last=False)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    found = Directory.list

    def away(place: Directory, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        if path.endswith("step-00000002"):
            raise OSError(errno.EIO, "Input/output error")
        return found(place, path)

    with Checkpointer(str(tmp_path), leave=Leave(save_last=False)) as checkpointer:
        monkeypatch.setattr(Directory, "list", away)
        with pytest.raises(
            CheckpointError, match=r"step-00000002 may be a good checkpoint, and it could not be looked"
        ):
            checkpointer.restore(state)
        monkeypatch.undo()
        assert checkpointer.restore(state) == 2
