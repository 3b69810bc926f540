"""What is planned is what torch's own planner plans, and fits the state although nothing is kept between saves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.errors import CheckpointError

STATE: dict[str, Any] = {
    "model": OrderedDict(w=torch.ones(3, 2), same=torch.zeros(3, 2), other=torch.ones(3, 2).double()),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 1: {}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    "lists": [[1, 2], [torch.ones(1), [torch.ones(1)], "text"], (torch.ones(2), 1)],
    "empty": torch.empty(0, 4),
    "text": "value",
}


def planned(planner: SavePlanner, states: list[dict[str, Any]]) -> Any:
    """The plans of ranks with these states, and the metadata, in a form that can be compared."""
    local = []
    for rank, state in enumerate(states):
        planner.set_up_planner(state, None, rank == 0)
        local.append(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(local)
    items = [sorted((each.index.fqn, each.index.offset, each.type.name) for each in plan.items) for plan in plans]
    return items, metadata.state_dict_metadata, metadata.planner_data


@pytest.mark.parametrize(
    "states", [[STATE], [STATE, STATE], [{"a": 1}, STATE, {"a": 2, "own": torch.ones(1)}]], ids=len
)
def test_plan_and_metadata_are_those_of_torch(states: list[dict[str, Any]]) -> None:
    theirs = planned(DefaultSavePlanner(dedup_save_to_lowest_rank=True), states)
    assert planned(StatePlanner(), states) == theirs


@pytest.mark.parametrize("rank", range(6))
def test_parts_of_dtensors_are_planned_as_torch_does(rank: int) -> None:
    """Seven rows and two, columns, replicas and shards of shards on two times three ranks; and a mesh of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        elsewhere = DeviceMesh("cpu", [0, 1])
        state: dict[str, Any] = {"plain": torch.ones(7, 2), "elsewhere": DTensor.from_local(torch.ones(1), elsewhere)}
        for name, rows, placements in (
            ("rows", 7, [Replicate(), Shard(0)]),
            ("few", 2, [Replicate(), Shard(0)]),
            ("columns", 7, [Shard(1), Replicate()]),
            ("both", 7, [Shard(0), Shard(1)]),
            ("twice", 7, [_StridedShard(0, split_factor=3), Shard(0)]),
            ("all", 7, [Replicate(), Replicate()]),
        ):
            size = torch.Size([rows, 5])
            local = torch.ones(compute_local_shape_and_global_offset(size, mesh, placements)[0])
            state[name] = [
                DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=size, stride=(5, 1))
                for _ in range(2)
            ]
        items = []
        for planner in (DefaultSavePlanner(), StatePlanner()):
            planner.set_up_planner(state, None, is_coordinator=True)
            items.append(sorted(planner.create_local_plan().items, key=lambda item: item.index.fqn))
        assert items[0] == items[1]
        assert len(items[0]) == 14 - (rank > 1)
    finally:
        dist.destroy_process_group()


def shard(name: str, begin: int, end: int, whole: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([begin]), torch.Size([end - begin]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([whole]))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plans(*ranks: list[WriteItem]) -> list[SavePlan]:
    return [SavePlan(items, planner_data={}) for items in ranks]


def test_shards_make_up_a_whole_and_replicas_are_left_out() -> None:
    half, other = shard("x", 0, 4, 6), shard("x", 4, 6, 6)
    global_plans, metadata = StatePlanner().create_global_plan(plans([half], [other], [half]))
    assert [plan.items for plan in global_plans] == [[half], [other], []]
    assert metadata.state_dict_metadata["x"].chunks == [half.tensor_data.chunk, other.tensor_data.chunk]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "ranks",
    [
        [[shard("x", 0, 4, 6)], []],
        [[shard("x", 0, 4, 6)], [shard("x", 3, 6, 6)]],
        [[shard("x", 0, 4, 6)], [shard("x", 4, 8, 6)]],
        [[shard("x", 0, 6, 6)], [WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO)]],
    ],
    ids=["missing", "overlapping", "outside", "of two kinds"],
)
def test_parts_that_do_not_fit_together_are_refused(ranks: list[list[WriteItem]]) -> None:
    with pytest.raises(CheckpointError, match=r"do not cover|different kinds"):
        StatePlanner().create_global_plan(plans(*ranks))


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"both named 'a\.b'"):
        StatePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})
