"""A checkpointer that goes from directory to directory: each appears complete, and restoring from one takes no hold."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg import Checkpointer
from stagereg.checkpoint.options import Leave
from stagereg.errors import CheckpointError, ConfigError
from stagereg.testing import run_ranks


def saved(root: Path, *names: str) -> list[list[str]]:
    """Save to each of these directories in turn, and return what lay in ``root`` before each save had ended."""
    state: dict[str, Any] = {"x": torch.zeros(4), "of": ""}
    seen = []
    with Checkpointer(str(root / "first"), resume="never", leave=Leave(save_last=False)) as checkpointer:
        for step, name in enumerate(names):
            state["of"] = name
            checkpointer.move_to(root / name)
            seen.append(sorted(os.listdir(root)))
            checkpointer.save(step, state)
            checkpointer.wait()
            assert checkpointer.latest == root / name / f"step-{step:08d}"
    return seen


def test_a_directory_appears_with_its_first_checkpoint(tmp_path: Path) -> None:
    before = saved(tmp_path, "a", "b", "a")
    assert before[0] == [".a.tmp", "first"]
    assert before[1] == [".b.tmp", "a", "first"]
    assert before[2] == sorted(os.listdir(tmp_path)) == ["a", "b", "first"]
    assert sorted(os.listdir(tmp_path / "a")) == ["latest", "step-00000000", "step-00000002"]


def test_what_a_killed_run_left_hidden_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp/.step-00000000.ab.tmp").mkdir(parents=True)
    saved(tmp_path, "a")
    assert sorted(os.listdir(tmp_path)) == ["a", "first"]
    assert sorted(os.listdir(tmp_path / "a")) == ["latest", "step-00000000"]


def test_a_failed_first_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(str(tmp_path / "first"), leave=Leave(save_last=False)) as checkpointer:
        checkpointer.move_to(tmp_path / "a")
        with pytest.raises(CheckpointError):  # noqa: PT012
            checkpointer.save(1, {"x": lambda: None})
            checkpointer.wait()
        checkpointer.move_to(tmp_path / "b")
        assert sorted(os.listdir(tmp_path)) == [".b.tmp", "first"]


def test_the_directory_left_is_free_and_the_new_one_is_held(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "a")) as one, Checkpointer(str(tmp_path / "c")) as other:
        with pytest.raises(CheckpointError, match="in use by another"):
            one.move_to(tmp_path / "c")
        one.move_to(tmp_path / "b")
        one.save(1, {"x": 1})
        one.wait()
        with pytest.raises(CheckpointError, match="in use by another"):
            other.move_to(tmp_path / "b")
        other.move_to(tmp_path / "a")


def test_restoring_from_elsewhere_takes_no_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"x": torch.zeros(4), "n": 0}
    with Checkpointer(str(tmp_path / "a")) as writer, Checkpointer(str(tmp_path / "b")) as reader:
        for step in (1, 2):
            writer.save(step, {"x": torch.full((4,), float(step)), "n": step})
        writer.wait()
        assert reader.restore(state, tmp_path / "a") == 2 == state["n"]
        assert reader.restore(state, f"{tmp_path}/a/step-00000001") == 1 == state["n"]
        assert reader.restore(state, tmp_path / "b") is None
        writer.move_to(tmp_path / "step-300")
        writer.save(3, {"x": torch.full((4,), 3.0), "n": 3})
        writer.wait()
        assert reader.restore(state, tmp_path / "step-300") == 3 == state["n"]
        [file] = (tmp_path / "a/step-00000002").glob("*.distcp")
        file.write_bytes(b"x" + file.read_bytes()[1:])
        with caplog.at_level(logging.WARNING):
            assert reader.restore(state, tmp_path / "a") == 1
        assert "step-00000002 is damaged and passed over" in caplog.text


def test_nothing_is_no_directory_to_move_to(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "a")) as checkpointer, pytest.raises(ConfigError):
        checkpointer.move_to("")


def moves(rank: int, world_size: int, root: str) -> list[str]:
    state = {"x": torch.zeros(8), "rank": rank}
    errors = []
    with Checkpointer(f"{root}/first", leave=Leave(save_last=False)) as checkpointer:
        for step in range(4):
            checkpointer.move_to(f"{root}/{step}")
            state["x"].fill_(step)
            checkpointer.save(step, state)
        try:
            checkpointer.move_to(f"{root}/of-rank-{rank}")
        except ConfigError as error:
            errors.append(str(error))
        for step in range(4):
            assert checkpointer.restore(state, f"{root}/{step}") == step
            assert (state["x"] == step).all()
        assert state["rank"] == rank
        if rank == 0:
            try:
                checkpointer.move_to(f"{root}/alone")
            except CheckpointError as error:
                errors.append(str(error))
        for _ in range(3):
            torch.distributed.barrier()
    return errors


def test_ranks_move_together(tmp_path: Path) -> None:
    (differ, alone), others = run_ranks(moves, 2, args=(str(tmp_path),))
    assert "of-rank-0" in differ
    assert [differ] == others
    assert "rank 1 did not call move_to()" in alone
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "first"]
