"""What is planned is what torch's own planner plans, and fits the state although nothing is kept between saves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from stagereg.checkpoint.state_planner import StatePlanner
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
    with pytest.raises(CheckpointError, match=r"do not fit together|different kinds"):
        StatePlanner().create_global_plan(plans(*ranks))


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"both called 'a\.b'"):
        StatePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})
