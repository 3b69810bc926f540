"""A join leaves everything as it was, however it is left, and one that was never entered has changed nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from .reference import Case, batch, net


def observe(ddp: DistributedDataParallel) -> dict[str, Any]:
    """All that a join could leave on a module."""
    return {
        "config": tuple(ddp._join_config)[:3],
        "divisor": ddp.__dict__.get("_divide_by_initial_world_size", "none"),
        "attributes": sorted(ddp.__dict__.keys() - {"_authoritative_rank"}),  # DDP sets it before each use
        "hooks": [len(p._backward_hooks or ()) for p in ddp.parameters()],
        "module hooks": (len(ddp._forward_pre_hooks), len(ddp._forward_hooks)),
    }


def nested(rank: int, world_size: int) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    joinable = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce"}])
    with stagereg.Join([joinable], throw_on_early_termination=True):
        for epoch in range(2):
            with stagereg.Join([ddp]):
                for step in range(1 + rank):
                    ddp(batch(rank, epoch, step)).sum().backward()
            assert joinable._join_config.throw_on_early_termination
            joinable(torch.zeros(()))
    return ddp._join_config.enable, joinable._join_config.enable


def test_a_join_inside_a_join_restores_the_outer_one() -> None:
    assert run_ranks(nested, 2, timeout_s=30) == [(False, False)] * 2


class Clumsy(stagereg.Joinable):
    """Its exit fails."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> stagereg.JoinHook:
        return stagereg.JoinHook()

    def detach(self) -> None:
        raise OSError("clumsy")

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def unentered_and_failing_exit(rank: int, world_size: int) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    before = observe(ddp)
    stagereg.Join([ddp, lambda: None])
    unentered = observe(ddp)
    joinables = [Clumsy(), ddp, Clumsy()]
    with contextlib.suppress(OSError), stagereg.Join(joinables):
        pass
    return before, unentered, observe(ddp), [joinable._join_config.enable for joinable in joinables]


def test_a_join_not_entered_or_that_fails_changes_nothing() -> None:
    for before, unentered, after, enabled in run_ranks(unentered_and_failing_exit, 2, timeout_s=30):
        for mark in ("config", "hooks", "module hooks"):
            assert unentered[mark] == before[mark]
        assert after == before
        assert enabled == [False, False, False]
