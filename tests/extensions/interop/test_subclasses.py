"""Tensors that wrap others: plain torch's are not rounded, and no file holds what they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stagereg
from stagereg.checkpoint.format.wrappers import same_bits
from stagereg.errors import CheckpointError
from stagereg.extensions.interop.export import TensorOptions, export
from tests.checkpoint.state.test_optimizer_carries import save
from tests.support.subclasses import codes


def test_what_plain_torch_saved_is_not_rounded(tmp_path: Path) -> None:
    large, small = codes(4, 30_000), codes(2)
    dcp.save({"x": {"large": large}, "y": {"small": small}}, checkpoint_id=str(tmp_path), no_dist=True)
    with stagereg.open_checkpoint(tmp_path) as checkpoint:
        assert same_bits(checkpoint["x.large"], large)
        with pytest.raises(CheckpointError, match=r"y\.small.*Codes"):
            checkpoint["y.small"]


def test_safetensors_refuses_them_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"x\.w': it is a .*Codes.*Use storage=.dcp"),
        stagereg.Checkpointer(str(tmp_path), every=1, storage=stagereg.build("storage", "safetensors")) as checkpointer,
    ):
        checkpointer.save(1, {"x": {"w": codes(4)}})


def test_a_file_of_their_own_keeps_them_or_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", x={"w": codes(4)})
    with stagereg.open_checkpoint(tmp_path / "a") as checkpoint:
        with pytest.raises(CheckpointError, match=r"cannot store 'x\.w', which wraps other tensors\. Write a \.pt"):
            export(checkpoint, None, tmp_path / "all.safetensors", False, TensorOptions())
        export(checkpoint, None, tmp_path / "all.pt", False, TensorOptions())
    assert same_bits(torch.load(tmp_path / "all.pt", weights_only=True)["x"]["w"], codes(4))
