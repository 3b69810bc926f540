"""A restore checks the files of a checkpoint while it reads them, and uses no value before the check has ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.load.loading import Loading
from stagereg.checkpoint.load.store_source import StoreSource
from stagereg.errors import CheckpointError

WAIT_S = 30.0


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = objects(0)
    state["model"](torch.ones(64)).sum().backward()
    state["optimizer"].step()
    with Checkpointer(str(tmp_path), every=1) as checkpointer:
        checkpointer.save(1, state)
    return tmp_path


def test_the_files_are_read_while_they_are_checked(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, check, prepare = threading.Event(), StoreSource.check, Loading.prepare

    def late(self: StoreSource, *args: Any) -> Mapping[str, Any]:
        assert read.wait(WAIT_S)
        return check(self, *args)

    def seen(self: Loading, *args: Any) -> None:
        prepare(self, *args)
        read.set()

    monkeypatch.setattr(StoreSource, "check", late)
    monkeypatch.setattr(Loading, "prepare", seen)
    state = objects(1)
    with Checkpointer(str(saved), every=1) as checkpointer:
        assert checkpointer.restore(state) is not None
    assert len(state["optimizer"].state) == 2
    assert not torch.equal(state["model"].weight, objects(1)["model"].weight)


def test_no_object_changes_before_the_check_has_ended(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, prepare = threading.Event(), Loading.prepare
    state = objects(1)
    before = {name: x.clone() for name, x in state["model"].state_dict().items()}

    def broken(self: StoreSource, *args: Any) -> Mapping[str, Any]:
        assert read.wait(WAIT_S)
        assert all(torch.equal(x, before[name]) for name, x in state["model"].state_dict().items())
        assert not state["optimizer"].state
        return dict.fromkeys(("__0_0.distcp",), "CRC-32 mismatch: as a test has it")

    def seen(self: Loading, *args: Any) -> None:
        prepare(self, *args)
        read.set()

    monkeypatch.setattr(StoreSource, "check", broken)
    monkeypatch.setattr(Loading, "prepare", seen)
    with Checkpointer(str(saved), every=1) as checkpointer, pytest.raises(CheckpointError, match="as a test has it"):
        checkpointer.restore(state)
    assert all(torch.equal(x, before[name]) for name, x in state["model"].state_dict().items())
    assert not state["optimizer"].state


def test_an_error_of_the_check_is_raised(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: StoreSource, *args: Any) -> Mapping[str, Any]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(StoreSource, "check", failing)
    with Checkpointer(str(saved), every=1) as checkpointer, pytest.raises(Exception, match="the disk is gone"):
        checkpointer.restore(objects(1))
    assert not [each for each in threading.enumerate() if each.name.startswith("stagereg-check")]
