"""Which checkpoint a run goes on from: none is passed over of which it is not known that it is bad."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from fsspec import url_to_fs

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError
from tests.support.places import PLACES, place


def test_one_that_cannot_be_looked_at_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    found = Directory.list

    def away(place: Directory, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        if path.endswith("step-00000002"):
            raise OSError(errno.EIO, "Input/output error")
        return found(place, path)

    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        monkeypatch.setattr(Directory, "list", away)
        with pytest.raises(CheckpointError, match=r"step-00000002 may be a valid checkpoint, but cannot be accessed"):
            checkpointer.restore(state)
        monkeypatch.undo()
        assert checkpointer.restore(state) == 2


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, tmp_path)


def delete(root: str, *steps: int) -> None:
    """Delete checkpoints as a user does by hand."""
    fs, path = url_to_fs(root)
    for step in steps:
        fs.rm(next(each for each in fs.ls(path, detail=False) if f"step-{step:08}" in each), recursive=True)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return [text for text in found if "was deleted or moved" in text]


@pytest.mark.parametrize(("gone", "left"), [([3], 2), ([2, 3], 1), ([1, 2, 3], None), ([1], 3), ([2], 3)])
def test_a_deleted_newest_checkpoint_is_named_with_the_one_that_the_run_resumes_from(
    root: str, gone: list[int], left: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(root, keep=9) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state)
    delete(root, *gone)
    told = ["starts from scratch" if left is None else f"resumes from step-{left:08}"] * (3 in gone)
    for _ in range(2):  # until another checkpoint is committed
        with Checkpointer(root) as checkpointer:
            assert checkpointer.restore(state) == left
        found = said(caplog)
        assert [part in text for part, text in zip(told, found, strict=True)] == [True] * len(told), found
        assert all("points to step-00000003" in text for text in found)
    if told:
        with Checkpointer(root, resume="latest") as checkpointer:
            why = rf"(?s)resume=.?latest.? was given, but .*step-00000003.*deleted.*{told[0]}"
            with pytest.raises(CheckpointError, match=why):
                checkpointer.restore(state)
            assert said(caplog) == []
    with Checkpointer(root) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(4, state)
        checkpointer.wait()
        assert checkpointer.latest is not None
    with Checkpointer(root, resume="latest") as checkpointer:
        assert checkpointer.restore(state) == 4
    assert len(said(caplog)) == len(told)


def test_a_restore_from_another_directory_names_the_deleted_checkpoint_there(
    root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    delete(root, 2)
    with Checkpointer(tmp_path / "mine") as checkpointer:
        assert checkpointer.restore(state, root) == 1
        assert ["resumes from step-00000001" in text for text in said(caplog)] == [True]
        assert checkpointer.restore(state, open_store(root).checkpoints()[0][0].path) == 1
        assert said(caplog) == []


def test_latest_that_a_killed_run_left_behind_is_moved_and_not_called_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    for pointed in ("step-00000001", None):
        (tmp_path / "latest").unlink()
        if pointed is not None:
            (tmp_path / "latest").symlink_to(pointed)
        with Checkpointer(tmp_path, resume="latest") as checkpointer:
            assert checkpointer.restore(state) == 2
            checkpointer.lock()
            assert (tmp_path / "latest").resolve().name == "step-00000002"
    assert said(caplog) == []
