"""Planned and counted joins give the numbers that torch's wire gives, and send only the collectives documented."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.kernel.channel import resources_of
from stagereg.testing import run_ranks

from ..support.reference import Case, batch, mlp, net

MODES = ["planned", "counted"]
WAYS = ["plain", "iterate"]


def sent() -> int:
    """How many collectives this rank has begun, in all process groups and their control channels."""
    groups = list(_world.pg_map)
    channels = [backend for group in groups for backend in resources_of(group).backends()]
    return sum(group._get_sequence_number_for_group() for group in [*groups, *channels])


def steps(rank: int, mode: str | None, throw: bool, way: str) -> list[int]:
    """The collectives of each step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp().double())
    data = [batch(rank, 0, step) for step in range(7)]
    seen = []
    join = stagereg.Join([ddp], enable=mode is not None, throw_on_early_termination=throw, mode=mode, loader=data)
    with join:
        for x in join.iterate(data) if way == "iterate" else data:
            before = sent()
            ddp(x).sum().backward()
            seen.append(sent() - before)
    return seen


SENDING = [(None, False), *((mode, throw) for mode in MODES for throw in (False, True))]


def all_steps(rank: int, world_size: int) -> dict[Any, list[int]]:
    return {(mode, throw, way): steps(rank, mode, throw, way) for mode, throw in SENDING for way in WAYS}


def test_a_planned_step_sends_nothing_and_a_counted_one_a_sum() -> None:
    for sent in run_ranks(all_steps, 2, timeout_s=60):
        for (mode, throw, way), found in sent.items():
            without = sent[None, False, way]
            assert len(without) == 7
            assert found == [each + (mode == "counted") for each in without], (mode, throw, way)


def epochs(rank: int, world_size: int) -> tuple[list[tuple[int, int]], set[Any], bool]:
    """The keys in the store and the threads after each of some planned joins over uneven inputs, and time limits."""
    ddp = DistributedDataParallel(mlp().double())
    group: Any = dist.group.WORLD
    options = group._get_backend(torch.device("cpu")).options
    limit = options._timeout
    counts, limits = [], set()
    for epoch in range(8):
        data = [batch(rank, epoch, step) for step in range(10 + rank)]
        with stagereg.Join([ddp], mode="planned", loader=data, timeout=30):
            limits.add(options._timeout)
            for x in data:
                ddp(x).sum().backward()
        idle = threading.Event()
        # The thread deletes the keys of the join before first.
        resources_of(group).channels["membership"].thread.submit(idle.set)
        idle.wait(20)
        dist.barrier()
        counts.append((group.get_group_store().num_keys(), threading.active_count()))
        dist.barrier()
    return counts[1:], limits, options._timeout == limit


def test_joins_in_a_row_share_threads_and_leave_the_last_keys() -> None:
    for counts, limits, is_put_back in run_ranks(epochs, 2, timeout_s=60):
        keys, threads = zip(*counts, strict=True)
        assert max(keys) - min(keys) < 10, counts
        assert len(set(threads)) == 1
        assert limits == {timedelta(seconds=30)}
        assert is_put_back


def ahead(rank: int, world_size: int, mode: str) -> int:
    """Rank 1 begins no step before rank 0 is in the forward of that step."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(mlp().double())
    step = 0
    # DDP's own forward waits for others, in the second step, so this looks just before it.
    ddp.register_forward_pre_hook(lambda *_: store.set(f"in forward/{step}", "1") if rank == 0 else None)
    with stagereg.Join([ddp], throw_on_early_termination=True, mode=mode, loader=range(4), timeout=20):
        for step in range(4):
            if rank == 1:
                store.get(f"in forward/{step}")
            ddp(batch(rank, 0, step)).sum().backward()
    return step


@pytest.mark.parametrize("mode", MODES)
def test_no_rank_waits_for_another_before_its_forward(mode: str) -> None:
    assert run_ranks(ahead, 2, args=(mode,), timeout_s=30) == [3, 3]


class Sealed:
    """A batch that cannot be cut and has no length."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Unkept(list[Any]):
    """Has a length, and gives nothing."""

    def __iter__(self) -> Any:
        return iter(())


def looped(data: list[Any], read: Any, mode: str | None = None, example: Any = None) -> list[int] | str:
    """The samples of each batch, or the error of the loop."""
    ddp = DistributedDataParallel(net(Case() if mode == "planned" else Case(net="norm")).eval())
    join = stagereg.Join([ddp], mode=mode, timeout=20)
    lengths = []
    try:
        with join:
            for b in join.iterate(data, example=example):
                ddp(x := read(b)).sum().backward()
                lengths.append(len(x))
    except JoinError as error:
        return str(error)
    return lengths


def odd_batches(rank: int, world_size: int) -> dict[str, list[int] | str]:
    boxes = [Sealed(batch(rank, 0, step)) for step in range(2)]

    def dicts() -> list[Any]:
        return [{"x": batch(rank, 0, step)} for step in range(2)]

    def unkept() -> list[Any]:
        return Unkept(dicts()) if rank == 0 else dicts()

    def read(box: Sealed) -> torch.Tensor:
        return box.x

    empty = Sealed(torch.zeros(0, 4, dtype=torch.float64))
    found = {
        "even": looped(boxes, read),
        "popped": looped(dicts() * rank, lambda taken: taken.pop("x")),
        "example": looped(boxes * rank, read, example=empty),
        "counted": looped(boxes, read, "counted"),
        "unkept": looped(unkept(), lambda taken: taken.pop("x"), "counted"),
    }
    return found | {"sealed": looped(boxes * rank, read, "counted")}


def wrongly_planned(rank: int, world_size: int) -> list[int] | str:
    batches: list[Any] = [{"x": batch(rank, 0, step)} for step in range(2)]
    return looped(Unkept(batches) if rank == 0 else batches, lambda taken: taken.pop("x"), "planned")


def test_only_batches_that_a_rank_may_need_have_to_be_emptied() -> None:
    first, second = run_ranks(odd_batches, 2, timeout_s=60)
    for found in (first, second):
        assert found["even"] == found["counted"] == [3, 3]
        assert "batch, a Sealed, cannot be emptied" in found["sealed"]
    for found in run_ranks(wrongly_planned, 2, timeout_s=60):
        assert "yielded no batch to derive an empty batch from" in found
    assert first["popped"] == first["example"] == first["unkept"] == [0, 0]
    assert second["popped"] == second["example"] == second["unkept"] == [3, 3]


def refusals(rank: int, world_size: int) -> dict[Any, str]:
    found = {(mode, way): without_a_length(rank, mode, way) for mode in ("planned", "auto") for way in WAYS}
    ddp = DistributedDataParallel(mlp().double())
    with pytest.raises(JoinError) as error, stagereg.Join([ddp], mode="planned"):
        ddp(batch(rank, 0, 0)).sum().backward()
    return found | {"no loader": str(error.value)}


def without_a_length(rank: int, mode: str, way: str) -> str:
    ddp = DistributedDataParallel(mlp().double())
    data: Any = [batch(rank, 0, step) for step in range(1 + rank)]
    loader = iter(data) if rank == 1 else data
    try:
        join = stagereg.Join([ddp], mode=mode, loader=loader if way == "plain" else None)
        with join:
            for x in join.iterate(loader) if way == "iterate" else data:
                ddp(x).sum().backward()
    except JoinError as error:
        return str(error)
    return type(join).__name__


def test_a_plan_needs_every_ranks_length_and_auto_counts_without() -> None:
    for errors in run_ranks(refusals, 3, timeout_s=30):
        for way in WAYS:
            assert "the loader of rank 1 has none" in errors["planned", way]
            assert 'mode="counted"' in errors["planned", way]
            assert errors["auto", way] == "Join"
        assert "join.iterate(loader)" in errors["no loader"]
        assert "loader=loader" in errors["no loader"]
