"""A staged copy of another structure is refused by path, on all ranks; other values and dtypes are not."""

from __future__ import annotations

import copy
import io
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed._functional_collectives import all_reduce
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import staging
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.save.structure import expect_same_structure, outline
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingStager
from stagereg.testing import run_ranks
from tests.support.states import settled
from tests.support.subclasses import codes, nested

Pair = namedtuple("Pair", "left right")


def _state() -> dict[str, Any]:
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}
    return {
        "model": OrderedDict(w=torch.ones(2, 2)),
        "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]},
        "losses": [1.0, 2.0],
        "queue": [torch.ones(2), {"n": 1}],
        "n": 3,
    }


def _moments(copied: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = copied["optimizer"]["state"][0]
    return found


def _put(copied: Any, **entries: Any) -> None:
    copied.update(entries)


def _rekey(copied: dict[str, Any]) -> None:
    copied["optimizer"]["state"] = {"0": _moments(copied)}


REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "'optimizer.state.0.exp_avg' is missing": lambda c: _moments(c).pop("exp_avg"),
    "'optimizer.state.0.exp_avg' is of type dict instead of tensor": lambda c: _put(
        _moments(c), exp_avg={"high": torch.ones(2, 2), "low": torch.ones(2, 2)}
    ),
    "'optimizer.state.0.exp_avg' has the shape [4] instead of [2, 2]": lambda c: _put(
        _moments(c), exp_avg=torch.ones(4)
    ),
    "'optimizer.state.0.step' is of type number instead of tensor": lambda c: _put(_moments(c), step=1.0),
    "'optimizer.state.0.error' is added": lambda c: _put(_moments(c), error=torch.ones(1)),
    "the key of 'optimizer.state.0' is of type str instead of int": _rekey,
    "'optimizer.param_groups.0.betas' is of type list instead of tuple": lambda c: _put(
        c["optimizer"]["param_groups"][0], betas=[0.9, 0.99]
    ),
    "'optimizer' is missing": lambda c: c.pop("optimizer"),
    "'losses' has 1 items instead of 2": lambda c: c["losses"].pop(),
    "'losses' has items of other types": lambda c: c["losses"].__setitem__(0, "1.0"),
    "'queue' has 1 items instead of 2": lambda c: c["queue"].pop(),
    "'queue.1.n' is of type tensor instead of number": lambda c: _put(c["queue"][1], n=torch.tensor(1)),
    "'queue.0' is of type NoneType instead of tensor": lambda c: c["queue"].__setitem__(0, None),
    "'n' is of type str instead of number": lambda c: _put(c, n="3"),
    "'n' is missing; 'meta' is added": lambda c: (c.pop("n"), _put(c, meta={})),
    "'optimizer' is missing; 'losses' is missing; 'queue' is missing; and 1 more": lambda c: [
        c.pop(name) for name in ("losses", "queue", "n", "optimizer")
    ],
    f"...{'x' * 65}.leaf.weight' is added": lambda c: _put(c["model"], **{f"{'x' * 200}.leaf.weight": torch.ones(1)}),
}


@pytest.mark.parametrize("told", REFUSED)
def test_each_change_of_structure_is_refused_with_its_path(told: str) -> None:
    state = _state()
    copied = copy.deepcopy(state)
    REFUSED[told](copied)
    with pytest.raises(CheckpointError) as refused:
        expect_same_structure(outline(state), copied, "mine.Mine")
    assert str(refused.value).startswith("stage() of mine.Mine returned a copy with another structure: ")
    assert f"{told}. A stager may change the values and dtypes" in str(refused.value)


def test_other_values_dtypes_and_kinds_of_mapping_are_not_refused() -> None:
    state = _state()
    copied = copy.deepcopy(state)
    copied["model"] = {"w": torch.zeros(2, 2, dtype=torch.int8)}  # torch's stagers make dicts of all mappings
    _put(_moments(copied), exp_avg=torch.nn.Parameter(torch.zeros(2, 2).bfloat16()))
    _put(copied, losses=[3, 4], n=np.float64(5))
    copied["optimizer"] = dict(reversed(copied["optimizer"].items()))
    expect_same_structure(outline(state), copied, "mine.Mine")


class Edits(BlockingStager):
    """Edits the copies of some saves, counted from 1."""

    def __init__(self, edit: Callable[[dict[str, Any]], object], *saves: int) -> None:
        super().__init__()
        self.edit, self.saves, self.count = edit, saves, 0

    def stage(self, state_dict: Any) -> Any:
        copied = super().stage(state_dict)
        self.count += 1
        if self.count in self.saves:
            self.edit(copied)
        return copied


def _trained(steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "losses": stagereg.per_rank([1.0])}


def _drop_moment(copied: dict[str, Any]) -> None:
    for moments in copied["optimizer"]["state"].values():
        moments.pop("exp_avg")


def test_a_save_is_refused_whichever_it_is_and_the_next_good_one_is_made(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), stager=Edits(_drop_moment, 1, 2, 4), keep=9) as checkpointer:
        checkpointer.save(1, _trained(0))  # whose optimizer has no state yet, so nothing is dropped
        for step in (2, 3, 4, 5):
            checkpointer.save(step, _trained(1))
            if step in (2, 4):
                with pytest.raises(CheckpointError, match=rf"^Step {step} was not saved: .*exp_avg' is missing"):
                    checkpointer.wait()
            checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", *(f"step-0000000{step}" for step in (1, 3, 5))]


def save_on(rank: int, world_size: int, folder: str) -> list[str]:
    stager = Edits(_drop_moment, *((2,) if rank == 1 else ()))
    told = []
    with Checkpointer(folder, stager=stager, keep=9) as checkpointer:
        state = _trained(1)
        for step in (1, 2, 3):
            try:
                checkpointer.save(step, state)
                checkpointer.wait()
                told.append("")
            except CheckpointError as error:
                told.append(str(error))
    return told


def test_the_fault_of_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for first, second, third in run_ranks(save_on, 2, args=(str(tmp_path),)):
        assert (first, third) == ("", "")
        assert "Step 2 was not saved: rank 1: stage() of " in second
        assert "'optimizer.state.weight.exp_avg' is missing" in second
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000003"]


def _odd() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,))
    shards = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 5, 3)
    split: Any = torch.ones(4)
    split.global_shape, split.global_offsets = torch.Size([8]), [(0,)]
    split.local_offsets, split.local_sizes = [(0,)], [(4,)]
    return {
        "plain": [None, {1, 2}, frozenset({1}), 1j, b"x", bytearray(b"x"), torch.float32, torch.Size([1]), len],
        "objects": [io.BytesIO(b"x"), SimpleNamespace(a=1), deque([1]), np.float64(1), np.int64(2), np.ones(3)],
        "mappings": [OrderedDict(a=torch.ones(1)), defaultdict(int, {1: 2}), Counter("ab"), {}],
        "sequences": [Pair(torch.ones(1), 1), ((torch.ones(1),),), [[], ()], [*range(5000)]],
        "configs": [OmegaConf.create({"a": "${absent}"}), OmegaConf.create([1])],
        "keys": {1: 1, "a": 2, (1, 2): 3, None: 4, 2.5: 5},
        "tensors": [torch.nn.Parameter(torch.ones(2)), torch.tensor(1.0), torch.empty(0, 3), torch.ones(1).expand(5)],
        "wrappers": [codes(4), nested(4)],
        "dtensors": [distribute_tensor(torch.arange(5.0), mesh, [place]) for place in (Shard(0), Replicate())],
        "result of a collective": all_reduce(torch.ones(3), "sum", dist.group.WORLD),  # a wrapper; its copy is plain
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "split": split,
        "sharded": shards,
        "sparse": torch.eye(3).to_sparse(),
        "ragged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }


# What torch's stagers do not take, or, of a split tensor, make something else of.
_TAKEN_BY_OURS = ("split", "sharded", "sparse", "ragged", "wrappers")


def refused_on(rank: int, world_size: int) -> list[str]:
    built = {name: stagereg.build("stager", name) for name in ("blocking", "pinned_cached", "overlapped")}
    torchs = {
        "default": staging.DefaultStager(staging.StagingOptions(False, False, False, False)),
        "blocking of torch": staging.BlockingAsyncStager(),
    }
    told = []
    for name, stager in {**built, **torchs}.items():
        state = {key: x for key, x in _odd().items() if name in built or key not in _TAKEN_BY_OURS}
        for _ in range(2):  # from a cache, too
            expected, copied = outline(state), settled(stager.stage(state))
            try:
                expect_same_structure(expected, copied, name)
            except CheckpointError as error:
                told.append(str(error))
        stager.close()
    return told


def test_no_stager_of_the_project_or_of_torch_is_refused() -> None:
    assert run_ranks(refused_on, 1) == [[]]
