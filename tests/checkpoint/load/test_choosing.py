"""Which checkpoint a run goes on from: none is passed over of which it is not known that it is bad."""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from fsspec import url_to_fs

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, Preempted
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
        with pytest.raises(
            CheckpointError, match=r"step-00000002 may be a good checkpoint, and it could not be looked"
        ):
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
            why = rf"(?s)resume=.?latest.?, but .*step-00000003.*deleted.*{told[0]}"
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


def train(root: object, steps: Iterable[int], resume: str = "auto", source: str | None = None, keep: int = 9) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(str(root), keep=keep, resume=resume, save_last=False) as checkpointer:
        checkpointer.restore(state, source)
        for step in steps:
            checkpointer.save(step, state)


def test_newer_checkpoints_than_the_one_that_the_option_names_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return [text for text in found if "as the option names it" in text]

    before, run = tmp_path / "before", tmp_path / "run"
    train(before, [20])
    first = str(before / "step-00000020")
    train(run, [], first)
    train(run, [], "auto", first)
    train(run, [20, 31], first)
    assert warned() == []  # as the run had no checkpoint yet
    train(run, [], first)
    assert warned() == [
        f"stagereg: resumed from step 20, in {first}, as the option names it, although this run's directory has "
        f"{run}/step-00000031, 11 steps ahead. The checkpoints that this run saves replace step-00000031, and delete "
        "it when they are as many as are kept. If this command was started again to continue, stop it now, and start "
        'it with resume="auto".'
    ]
    assert (run / "step-00000031").exists()
    train(run, [], "step-00000020")
    assert len(warned()) == 1
    for resume in ("auto", "latest", "step-00000031", "never"):
        train(run, [], resume)
    train(run, [], "auto", first)
    assert warned() == []
    files = [each for each in (run / "step-00000031").iterdir() if each.suffix == ".distcp"]
    content = files[0].read_bytes()
    files[0].write_bytes(bytes(len(content)))  # which "auto" skips
    train(run, [])
    files[0].write_bytes(content)
    assert warned() == []
    # What the warning says is lost, and what it proposes.
    train(run, [25, 30], first, keep=2)
    assert sorted(each.name for each in run.glob("step-*")) == ["step-00000025", "step-00000030"]
    assert len(warned()) == 1

    counts_anew = tmp_path / "anew"
    train(counts_anew, [1, 2], first)
    train(counts_anew, [], first)
    [text] = warned()
    assert "step-00000002. The checkpoints" in text
    monkeypatch.setattr("sys.argv", ["another", "program"])
    train(counts_anew, [], first)
    assert warned() == []


@pytest.mark.parametrize(("resume", "told"), [("auto", False), ("never", True), ("PATH", True)])
def test_a_preempted_run_names_the_option_unless_the_same_command_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str, told: bool
) -> None:
    state = {"x": torch.zeros(3)}
    train(tmp_path / "before", [1])
    named = str(tmp_path / "before" / "step-00000001") if resume == "PATH" else resume
    with pytest.raises(Preempted), Checkpointer(tmp_path / "run", resume=named) as checkpointer:  # noqa: PT012
        checkpointer.restore(state)
        signal.raise_signal(signal.SIGTERM)
        checkpointer.maybe_save(2, state)
    [text] = [each.getMessage() for each in caplog.records if "preempted" in each.getMessage()]
    how = '; to resume from there, start the run with resume="auto"'
    assert text.endswith(f"step 2 is saved in {tmp_path}/run{how * told}")
