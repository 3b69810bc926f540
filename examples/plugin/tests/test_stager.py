"""Tests of the stager: its contract, and the tensors that it casts or only copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stagereg import StageregError
from stagereg.testing import run_ranks
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lean_export.stager import Bf16Stager
from lean_export.stager_contract import Bf16Contract


class TestContract(Bf16Contract):
    """Inherits the tests of the contract. pytest collects only subclasses whose name begins with Test."""


def test_wide_tensors_are_cast_and_others_copied() -> None:
    source: dict[str, Any] = {
        "w": torch.randn(6, 4),
        "average": [torch.randn(3, dtype=torch.float64)],
        "step": torch.tensor(7),
    }
    staged = Bf16Stager().stage({**source, "half": torch.randn(3).half(), "note": "as it is"})
    assert torch.equal(staged["w"], source["w"].to(torch.bfloat16))
    assert torch.equal(staged["average"][0], source["average"][0].to(torch.bfloat16))
    assert (staged["step"].dtype, staged["half"].dtype) == (torch.int64, torch.float16)
    assert staged["note"] == "as it is"


def test_overlapping_views_share_their_copy() -> None:
    qkv = torch.randn(12, 4)
    staged = Bf16Stager().stage({"qkv": qkv, "k": qkv[4:8], "turned": qkv.t()})
    assert torch.equal(staged["k"], qkv[4:8].to(torch.bfloat16))
    staged["qkv"][4].fill_(1.0)
    assert staged["k"][0].eq(1.0).all()
    assert staged["turned"].stride() == (1, 4)
    assert staged["k"].untyped_storage().nbytes() == qkv.nbytes // 2


def test_a_value_that_cannot_be_staged_is_named() -> None:
    freed = torch.randn(8, dtype=torch.float64)
    freed.untyped_storage().resize_(0)
    for bad in (freed, torch.empty(3, device="meta")):
        with pytest.raises(StageregError, match=r"cannot stage 'model\.head\.0'"):
            Bf16Stager().stage({"count": torch.tensor(1), "model": {"body": torch.ones(2), "head": [bad]}})


def stage_sharded(rank: int, world: int, folder: str) -> tuple[torch.dtype, bool]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(12.0).reshape(6, 2) / 7
    staged = Bf16Stager().stage({"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}})
    weight = staged["model"]["w"]
    assert isinstance(weight, DTensor)
    save(staged, checkpoint_id=folder)
    equal = torch.equal(weight.full_tensor(), whole.to(torch.bfloat16))
    return weight.to_local().dtype, equal and weight.placements == (Shard(0),)


def test_a_dtensor_is_cast_and_plain_torch_reads_it(tmp_path: Path) -> None:
    assert run_ranks(stage_sharded, 2, args=(str(tmp_path / "export"),)) == [(torch.bfloat16, True)] * 2
    read = {"model": {"w": torch.zeros(6, 2, dtype=torch.bfloat16)}}
    load(read, checkpoint_id=tmp_path / "export", no_dist=True)
    assert torch.equal(read["model"]["w"], (torch.arange(12.0).reshape(6, 2) / 7).to(torch.bfloat16))
