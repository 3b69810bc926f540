"""``map_memory`` changes the tensors that it is to change, wherever their bytes are, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stagereg.errors import StagingError
from stagereg.stagers.blocking import BlockingStager
from stagereg.stagers.host import HostStager
from stagereg.stagers.overlapped import OverlappedStager
from stagereg.testing import StagerContract, run_ranks
from tests.support.states import assert_same, settled
from tests.support.subclasses import Codes, codes

ODD = 1.001  # no bfloat16, nor is any multiple of it below
map_memory = HostStager.map_memory


def round_(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


class RoundingStager(BlockingStager):
    """As an author writes it."""

    def stage(self, state_dict: Any) -> Any:
        return super().stage(map_memory(state_dict, round_, where=lambda x, path: path.startswith("optimizer.")))


class Rounding(StagerContract):
    def make(self) -> RoundingStager:
        return RoundingStager()

    def expected(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        rounds = path.startswith("optimizer.") and tensor.is_floating_point() and tensor.ndim > 0
        return round_(tensor) if rounds else tensor


class RoundingElsewhere(Rounding):
    def expected(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        return super().expected(tensor, path.replace("model.", "optimizer."))


def test_a_contract_states_by_path_what_the_stager_changes() -> None:
    promise = "test_a_training_loop_is_staged_as_it_was"
    assert Rounding.outcome(promise).kept
    assert "copy['model']['0.weight'] differ" in RoundingElsewhere.outcome(promise).seen


def test_the_changed_tensors_are_those_of_floating_point_with_dimensions_that_where_chooses() -> None:
    moments = {"exp_avg": torch.full((2, 3), ODD), "step": torch.tensor(257.0), "count": torch.tensor([257])}
    state = {"model": {"w": torch.full((2,), ODD)}, "optimizer": {"state": {0: moments}, "note": "x"}}
    asked: list[str] = []

    def where(x: torch.Tensor, path: str) -> bool:
        asked.append(path)
        return path == "optimizer.state.0.exp_avg"

    made = map_memory(state, round_, where)
    assert asked == ["model.w", "optimizer.state.0.exp_avg"]
    expected = {**moments, "exp_avg": torch.ones(2, 3)}
    assert_same(BlockingStager().stage(made), {**state, "optimizer": {"state": {0: expected}, "note": "x"}})
    made = map_memory(state, lambda x: x.bfloat16())
    dtypes = [x.dtype for x in (made["model"]["w"], *made["optimizer"]["state"][0].values())]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.int64]


def test_strides_ties_and_views_are_as_they_were() -> None:
    qkv = torch.arange(400, dtype=torch.float32).mul_(ODD)[100:220].view(12, 10)
    state = {"k": qkv[4:8], "qkv": qkv, "turned": qkv.t(), "column": qkv[:, 3], "many": qkv[0, :1].expand(7)}
    sizes: list[int] = []
    with_an_offset = lambda x: torch.cat([torch.zeros(3), x]).bfloat16()[3:]  # noqa: E731
    with_a_stride = lambda x: torch.stack([x, x * 0], 1).bfloat16()[:, 0]  # noqa: E731
    for cast in (with_an_offset, with_a_stride):
        made = map_memory(state, lambda x, cast=cast: sizes.append(x.numel()) or cast(x))  # type: ignore[misc]
        for name, x in state.items():
            assert torch.equal(made[name], x.bfloat16())
            assert (made[name].stride(), type(made[name])) == (x.stride(), torch.Tensor)
        made["qkv"].fill_(1)
        assert all(bool(x.eq(1).all()) for x in made.values())
    assert sizes == [120, 120]


def test_memory_stays_if_one_tensor_over_it_is_refused() -> None:
    w, other = torch.full((4,), ODD), torch.full((4,), ODD)
    state = {"embed": w, "head": w, "again": w, "view": other[:2], "other": other, "count": other[0]}
    made = map_memory(state, round_, lambda x, path: path not in ("head", "other"))
    assert_same(BlockingStager().stage(made), state)
    assert made["embed"].data_ptr() == made["head"].data_ptr() == w.data_ptr()


@dataclass
class Box:
    moment: torch.Tensor


def test_the_source_stays_and_what_makes_tensors_more_is_in_the_copy() -> None:
    p: Any = torch.nn.Parameter(torch.full((3,), ODD))
    plain: Any = torch.full((3,), ODD)
    p.note, plain.note, plain.grad_copy = ["p"], ["plain"], torch.full((2,), ODD)
    note = plain.note
    wrapper = codes(4)
    wrapper.scale.fill_(ODD)
    state = {"p": p, "plain": plain, "conj": torch.full((2,), 1j * ODD).conj().imag, "codes": wrapper}
    state |= {"box": Box(torch.full((2,), ODD)), "queue": deque([torch.full((2,), ODD)]), "empty": torch.empty(0, 3)}
    before = {name: x.detach().clone() for name, x in (("p", p), ("plain", plain))}
    made = map_memory(state, round_, lambda x, path: path != "plain")
    assert plain.note is note
    assert all(torch.equal(x, state[name].detach()) for name, x in before.items())
    assert (type(made["p"]), made["p"].note, made["plain"].note) == (torch.nn.Parameter, ["p"], ["plain"])
    assert bool(made["p"].eq(1).all())
    assert torch.equal(made["plain"].grad_copy, plain.grad_copy)
    assert (made["box"].moment.tolist(), made["queue"][0].tolist()) == ([1, 1], [1, 1])
    assert made["conj"].tolist() == [-1, -1]
    assert bool(made["codes"].scale.eq(ODD).all())


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "writes": (lambda x: x.mul_(2), "wrote into the state. Return a new tensor instead"),
    "cuts": (lambda x: x[:-1], r"returned a Tensor \[3\] for a Tensor \[4\]"),
    "makes none": (lambda x: None, r"returned None for a Tensor \[4\]"),
    "packs": (lambda x: Codes(x.char(), x), r"returned a Codes \[4\] for a Tensor \[4\]"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_function_that_writes_or_returns_something_else_is_refused_by_path(how: str) -> None:
    function, told = WRONG[how]
    with pytest.raises(StagingError, match=rf"'model\.w': the function of map_memory\(\) {told}"):
        map_memory({"model": {"w": torch.ones(4)}}, function)


def test_a_tensor_over_a_freed_storage_is_refused_by_the_copier_by_path() -> None:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(8)
    with pytest.raises(StagingError, match=r"'model\.w'"):
        BlockingStager().stage(map_memory({"model": {"w": freed}, "x": torch.ones(2)}, round_))


def test_it_goes_with_a_stager_that_copies_later() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    stager = OverlappedStager()
    stager.watch(optimizer)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        expected = BlockingStager().stage(map_memory(state, round_, lambda x, path: path.startswith("optimizer.")))
        staged = stager.stage(map_memory(state, round_, lambda x, path: path.startswith("optimizer.")))
        optimizer.step()
        assert_same(settled(staged), expected)
    stager.close()


def parts_on(rank: int, world_size: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = distribute_tensor(torch.full((6, 2), ODD), mesh, [Shard(0)])
    shards = sharded_tensor.full(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), (5, 3), ODD)
    made = map_memory(
        {"d": whole, "s": shards, "kept": whole + 1}, torch.Tensor.bfloat16, lambda x, path: path != "kept"
    )
    local, shard = made["d"].to_local(), made["s"].local_shards()[0].tensor
    return [
        (local.dtype, shard.dtype, made["s"].dtype, made["kept"].dtype) == (*[torch.bfloat16] * 3, torch.float32),
        bool(local.eq(1).all() and shard.eq(1).all()),
        (made["d"].shape, made["d"].placements) == (whole.shape, whole.placements),
        made["s"].local_shards()[0].metadata.shard_sizes == [5, 3],
        bool(whole.to_local().eq(ODD).all()),
    ]


def test_parts_of_distributed_tensors_are_changed() -> None:
    assert run_ranks(parts_on, 1) == [[True] * 5]
