"""Control channels: separate from training's collectives, kept as long as their group, with bounded waits."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stagereg.kernel.broken import discard_channels
from stagereg.kernel.channel import control_channel, wait_until
from stagereg.testing import run_ranks


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def use(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    channel, other = control_channel(world(), "one", wait_until), control_channel(world(), "other", wait_until)
    seen["kept"] = control_channel(world(), "one", wait_until) is channel
    seen["apart"] = other is not channel

    sums = channel.add([1.0, float(rank), 0.5])
    seen["sum"] = sums.wait()
    seen["waited twice"] = (sums.ready(0.0), sums.wait())
    seen["gathered"] = channel.gather("x" * rank * 1000)

    # The ranks use training's group, and the two channels, in different orders.
    mine = torch.tensor([float(rank)])
    if rank == 0:
        one, two = channel.add([1.0]), other.add([10.0])
        dist.all_reduce(mine)
    else:
        dist.all_reduce(mine)
        two, one = other.add([10.0]), channel.add([1.0])
    seen["orders"] = (mine.item(), one.wait(), two.wait())

    # Rank 0 has requested and the others have not: until they do, its request is not ready.
    store = world().get_group_store()
    if rank == 0:
        late = channel.add([1.0])
        seen["not yet"] = late.ready(0.05), late.ready(0.0)
        store.set("come", "now")
    else:
        store.wait(["come"])
        late = channel.add([1.0])
    while not late.ready(5.0):
        pass
    seen["late"] = late.wait()
    seen["after it"] = channel.add([float(rank)]).wait()

    with mock.patch("stagereg.kernel.channel.LIMIT_S", 2.0):
        late = control_channel(world(), "late", wait_until)
        time.sleep(3.0 * (rank > 0))
        seen["long after"] = late.add([1.0]).wait()
    return seen


def test_a_channel_sums_and_gathers_and_can_be_waited_for() -> None:
    for rank, seen in enumerate(run_ranks(use, 3, timeout_s=40)):
        assert seen.pop("not yet", None) == ((False, False) if rank == 0 else None)
        assert seen == {
            "kept": True,
            "apart": True,
            "sum": [3.0, 3.0, 1.5],
            "waited twice": (True, [3.0, 3.0, 1.5]),
            "gathered": ["x" * each * 1000 for each in range(3)],
            "orders": (3.0, [3.0], [30.0]),
            "late": [3.0],
            "after it": [3.0],
            "long after": [3.0],
        }


def parts(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    channel = control_channel(pair, "of a pair", wait_until)  # made by its ranks alone
    seen["rank and size"] = (channel.rank, channel.size)
    seen["sum"] = channel.add([float(rank)]).wait()

    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    single = control_channel(alone, "alone", wait_until)
    seen["alone"] = (single.rank, single.size, single.add([1.0, 2.0]).wait(), single.gather("me"))
    seen["again"] = again(rank, world_size)
    return seen


def again(rank: int, world_size: int) -> list[Any]:
    """Destroy the process group and make one of the same name over other ranks of the same job."""
    name, before = world().group_name, control_channel(world(), "one", wait_until)
    sums = [before.add([1.0]).wait()]
    store = dist.PrefixStore("second", world().get_group_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=world_size - 1 - rank, world_size=world_size)
    after = control_channel(world(), "one", wait_until)
    sums.append(after.add([1.0]).wait())
    kept = control_channel(world(), "one", wait_until) is after
    return [world().group_name == name, after is before, after.rank, kept, *sums]


def test_a_channel_belongs_to_the_ranks_of_its_group() -> None:
    for rank, seen in enumerate(run_ranks(parts, 4, timeout_s=40)):
        assert seen["rank and size"] == (rank % 2, 2)
        assert seen["sum"] == [1.0 if rank < 2 else 5.0]
        assert seen["alone"] == (0, 1, [1.0, 2.0], ["me"])
        assert seen["again"] == [True, False, 3 - rank, True, [4.0], [4.0]]


def ready_and_wait(rank: int, world_size: int) -> list[Any]:
    """One sum that both ranks begin, and one that fails as the other rank closes its connections."""
    channel = control_channel(world(), "one", wait_until)
    first = channel.add([1.0])
    while not first.ready(1.0):
        pass
    found: list[Any] = [first.wait(), first.ready(0.0), first.wait()]
    dist.barrier()
    if rank == 0:
        failing = channel.add([1.0])
        for ask in (lambda: failing.ready(30.0), failing.wait, lambda: failing.ready(0.0), failing.wait):
            try:
                found.append(ask())
            except RuntimeError:
                found.append("raised")
        found += [first.ready(0.0), first.wait()]
    else:
        discard_channels(world())
    dist.barrier()
    return found


def test_a_sum_that_is_ready_is_there_and_one_that_failed_raises_each_time() -> None:
    first, other = run_ranks(ready_and_wait, 2, timeout_s=40)
    assert other == [[2.0], True, [2.0]]
    assert first == [*other, *["raised"] * 4, True, [2.0]]
