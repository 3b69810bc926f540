"""Tensors that are spread over ranks keep their placement, and cost each rank its own shard."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from stagereg import AsyncStager, BlockingAsyncStager
from stagereg.testing import run_ranks

from ..support.states import KINDS, assert_whole, build, kept, settled

STAGERS: list[Callable[[], AsyncStager]] = [
    *(functools.partial(build, kind) for kind in KINDS),
    *(functools.partial(BlockingAsyncStager, cached) for cached in (False, True)),
]


def each_stager() -> Iterator[AsyncStager]:
    for make in STAGERS:
        with contextlib.closing(make()) as stager:
            yield stager


def check_dtensor(stager: AsyncStager, source: DTensor) -> DTensor:
    """Stage ``source`` and overwrite it; return the copy, which must be what it was."""
    expected, local = kept({"x": source}), source.to_local()
    staged = settled(stager.stage({"x": source}))
    with torch.no_grad():
        local.fill_(-1)
    assert_whole(staged, expected)
    copy = staged["x"]
    for name in ("device_mesh", "shape", "dtype", "requires_grad"):
        assert getattr(copy, name) == getattr(source, name), name
    assert copy.stride() == source.stride()
    assert isinstance(copy, torch.nn.Parameter) == isinstance(source, torch.nn.Parameter)
    assert not local.numel() or copy.to_local().untyped_storage().nbytes() == local.nbytes
    return copy


def stage_dtensors(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(35.0).view(5, 7)
    for stager in each_stager():
        for _ in range(2):
            for placement in (Shard(0), Shard(1), Replicate()):
                copy = check_dtensor(stager, distribute_tensor(full.clone(), mesh, [placement]))
                assert torch.equal(copy.full_tensor(), full)
            partial = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
            summed = check_dtensor(stager, partial).full_tensor()
            assert summed.tolist() == [world_size * (world_size + 1) / 2] * 3
            check_dtensor(stager, distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]))  # nothing on the last rank
            check_dtensor(stager, torch.nn.Parameter(distribute_tensor(full.clone(), mesh, [Shard(0)])))


def stage_what_hangs_on_a_dtensor(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    x.tags, x.average, x.me = ["a"], torch.zeros(3), x
    for stager in each_stager():
        copy = settled(stager.stage({"x": x, "again": x, "average": x.average}))
        x.tags.append("b")
        x.average.add_(1)
        assert copy["x"] is copy["again"]
        assert copy["x"].me is copy["x"]
        assert copy["x"].tags == ["a"]
        assert copy["x"].average is copy["average"]
        assert copy["average"].eq(0).all()
        x.tags.pop()
        x.average.zero_()


def stage_a_sharded_model(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    # Shards of the first layer are large enough to be copied late; of the second, ranks have unequal ones.
    model = torch.nn.Sequential(torch.nn.Linear(7, 1200), torch.nn.Linear(1200, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(model.parameters())
    stagers = [make() for make in STAGERS]
    for step in range(3):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        before = {name: p.full_tensor().clone() for name, p in model.state_dict().items()}
        copies = [settled(stager.stage(state)) for stager in stagers]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        for number, copy in enumerate(copies):
            for name, full in before.items():
                assert torch.equal(copy["model"][name].full_tensor(), full), (number, step, name)
            assert isinstance(copy["optimizer"]["state"][0]["exp_avg"], DTensor)
    for stager in stagers:
        stager.close()


def stage_sharded_tensors(rank: int, world_size: int) -> None:
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(world_size)])
    for stager in each_stager():
        source = sharded_tensor.rand(spec, 5, 3)
        local = source.local_shards()[0].tensor.clone()
        copy = settled(stager.stage({"x": source}))["x"]
        source.local_shards()[0].tensor.fill_(-1)
        assert copy.metadata() == source.metadata()
        gathered = torch.empty(5, 3) if rank == 0 else None
        copy.gather(0, gathered)
        assert gathered is None or torch.equal(gathered[: local.shape[0]], local)
    with contextlib.closing(build("overlapped")) as stager:
        source = sharded_tensor.rand(spec, 5, 3)
        shard = weakref.ref(source.local_shards()[0].tensor)
        future = stager.stage({"x": source})
        stager.synchronize_staging()
        stager._thread.submit(int).result(30)  # the background thread has let go of its last arguments
        del source
        assert shard() is None, "a complete copy holds its source no longer"
        assert future.result()["x"].size() == (5, 3)


def stage_the_result_of_a_collective(rank: int, world_size: int) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    for stager in each_stager():
        result = all_reduce(torch.full((4,), rank + 1.0), "sum", dist.group.WORLD)
        assert isinstance(result, AsyncCollectiveTensor)
        copy = settled(stager.stage({"x": result, "same": result}))
        assert type(copy["x"]) is torch.Tensor
        assert copy["x"] is copy["same"]
        assert copy["x"].tolist() == [world_size * (world_size + 1) / 2] * 4


def check_all(rank: int, world_size: int) -> None:
    stage_dtensors(rank, world_size)
    stage_what_hangs_on_a_dtensor(rank, world_size)
    stage_a_sharded_model(rank, world_size)
    stage_sharded_tensors(rank, world_size)
    stage_the_result_of_a_collective(rank, world_size)


def test_what_is_spread_over_ranks_is_staged_as_it_is() -> None:
    run_ranks(check_all, 2, timeout_s=100)
