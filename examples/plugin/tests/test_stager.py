"""What the bf16 stager does beyond the contract: what it casts, what it leaves alone, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stagereg import StageregError
from stagereg.kernel.memory import Pool
from stagereg.testing import run_ranks
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lean_export.casting import CastingCopier
from lean_export.stager import Bf16Stager


def state() -> dict[str, Any]:
    return {
        "model": {"body.weight": torch.randn(6, 4), "norm.weight": torch.randn(4), "steps": torch.tensor(7)},
        "average": {"body.weight": torch.randn(6, 4, dtype=torch.float64)},
    }


def test_wide_tensors_are_cast_and_others_are_copied_as_they_are() -> None:
    source = {**state(), "half": torch.randn(3, dtype=torch.float16), "note": "as it is"}
    staged = Bf16Stager().stage(source)
    for owner, name in (("model", "body.weight"), ("model", "norm.weight"), ("average", "body.weight")):
        assert torch.equal(staged[owner][name], source[owner][name].to(torch.bfloat16))
    assert staged["model"]["steps"].dtype == torch.int64
    assert staged["half"].dtype == torch.float16
    assert staged["note"] == "as it is"


def test_patterns_choose_by_dotted_names() -> None:
    staged = Bf16Stager(include=["model.*"], exclude=["*.norm.*"]).stage(state())
    dtypes = {f"{owner}.{name}": x.dtype for owner, each in staged.items() for name, x in each.items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {"model.body.weight"}
    assert dtypes["average.body.weight"] == torch.float64


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(option: str) -> None:
    patterns: dict[str, Any] = {option: ["model.body.wieght"]}
    with pytest.raises(StageregError, match=rf"'model.body.wieght' of '{option}' .* mean 'model.body.weight'"):
        Bf16Stager(**patterns).stage(state())


def test_a_single_pattern_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(StageregError, match=r"include must be a list of patterns.*\['model.\*'\]"):
        Bf16Stager(include="model.*")


def test_tied_weights_stay_tied_even_where_a_pattern_names_only_one() -> None:
    weight = torch.randn(8, 4)
    for stager in (Bf16Stager(), Bf16Stager(include=["head"])):
        staged = stager.stage({"token": weight.detach(), "head": weight.detach()})
        assert staged["token"].data_ptr() == staged["head"].data_ptr()
        assert staged["token"].dtype == torch.bfloat16


def test_overlapping_views_share_their_copy_with_strides_and_offsets_kept() -> None:
    qkv = torch.randn(12, 4)
    staged = Bf16Stager().stage({"qkv": qkv, "k": qkv[4:8], "turned": qkv.t()})
    assert torch.equal(staged["k"], qkv[4:8].to(torch.bfloat16))
    staged["qkv"][4].fill_(1.0)
    assert staged["k"][0].eq(1.0).all()
    assert staged["turned"][:, 4].eq(1.0).all()
    assert staged["turned"].stride() == (1, 4)
    assert staged["k"].untyped_storage().nbytes() == qkv.nbytes // 2


def test_a_view_costs_its_own_elements() -> None:
    big = torch.randn(1000, 1000)
    staged = Bf16Stager().stage({"rows": big[3:5], "column": big[:, 7]})
    assert staged["rows"].untyped_storage().nbytes() == 2 * 1000 * 2
    assert torch.equal(staged["rows"], big[3:5].to(torch.bfloat16))
    assert staged["column"].untyped_storage().nbytes() == 1000 * 2
    assert torch.equal(staged["column"], big[:, 7].to(torch.bfloat16))


def test_a_copy_is_left_alone_until_it_is_dropped_and_its_memory_is_used_again() -> None:
    stager, source = Bf16Stager(), {"w": torch.zeros(4096), "n": torch.zeros(3, dtype=torch.int64)}
    addresses = set()
    held = stager.stage(source)
    for value in range(1, 5):
        source["w"].fill_(value)
        staged = stager.stage(source)
        addresses.add(staged["w"].data_ptr())
        assert staged["w"].eq(value).all()
        del staged
    assert held["w"].eq(0).all()
    assert len(addresses) == 1


def test_a_value_that_cannot_be_staged_is_named_by_its_path() -> None:
    freed = torch.randn(8, dtype=torch.float64)
    freed.untyped_storage().resize_(0)
    for bad in (freed, torch.empty(3, device="meta")):
        with pytest.raises(StageregError, match=r"cannot stage 'model\.head\.0'"):
            Bf16Stager().stage({"count": torch.tensor(1), "model": {"body": torch.ones(2), "head": [bad]}})


def test_closing_gives_the_memory_back() -> None:
    pool = Pool(pin=False)
    copier = CastingCopier(pool)
    copier.copy([torch.randn(1000)])
    assert pool.held_bytes >= 2000
    copier.close()
    assert pool.held_bytes == 0


def stage_sharded(rank: int, world: int, folder: str) -> tuple[torch.dtype, torch.dtype, bool]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(12.0).reshape(6, 2) / 7
    staged = Bf16Stager(include=["model.*"]).stage({"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}})
    weight = staged["model"]["w"]
    assert isinstance(weight, DTensor)
    save(staged, checkpoint_id=folder)
    equal = torch.equal(weight.full_tensor(), whole.to(torch.bfloat16))
    return weight.dtype, weight.to_local().dtype, equal and weight.placements == (Shard(0),)


def test_a_sharded_tensor_is_cast_and_plain_torch_reads_it(tmp_path: Path) -> None:
    for dtype, local, equal in run_ranks(stage_sharded, 2, args=(str(tmp_path / "export"),)):
        assert (dtype, local, equal) == (torch.bfloat16, torch.bfloat16, True)
    read = {"model": {"w": torch.zeros(6, 2, dtype=torch.bfloat16)}}
    load(read, checkpoint_id=tmp_path / "export", no_dist=True)
    assert torch.equal(read["model"]["w"], (torch.arange(12.0).reshape(6, 2) / 7).to(torch.bfloat16))
