"""A join leaves everything as it was, however it is left, and one that was never entered has changed nothing."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from .reference import Case, batch, net

WAYS_OUT = ["normal", "no batches", "error", "throw", "disabled"]
MODES = [None, "counted", "auto"]


def observe(ddp: DistributedDataParallel) -> dict[str, Any]:
    """All that a join could leave on a module."""
    return {
        "config": tuple(ddp._join_config)[:3],
        "divisor": ddp.__dict__.get("_divide_by_initial_world_size", "none"),
        "attributes": sorted(ddp.__dict__.keys() - {"_authoritative_rank"}),  # DDP sets it before each use
        "hooks": [len(p._backward_hooks or ()) for p in ddp.parameters()],
        "module hooks": (len(ddp._forward_pre_hooks), len(ddp._forward_hooks)),
    }


def all_leaving(rank: int, world_size: int) -> dict[Any, Any]:
    return {(way, mode): leaving(rank, way, mode) for mode in MODES for way in WAYS_OUT}


def leaving(rank: int, way: str, mode: str | None) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    ddp(batch(rank, 0, 0)).sum().backward()  # sets up what DDP sets up once
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    warnings.simplefilter("error", ResourceWarning)
    before, filters = observe(ddp), list(warnings.filters)
    length = {"no batches": 0, "disabled": 2, "error": 2}.get(way, 2 + rank)
    join = stagereg.Join(
        [ddp, optimizer],
        enable=way != "disabled",
        throw_on_early_termination=way == "throw",
        divide_by_initial_world_size=False,
        mode=mode,
    )
    stopped = False
    inside = None
    try:
        with join:
            inside = observe(ddp)
            data = [batch(rank, 0, step) for step in range(length)]
            for x in join.iterate(data) if mode == "auto" else data:
                ddp(x).sum().backward()
            if way == "error":
                raise KeyError(way)
    except (KeyError, stagereg.UnevenInputsError):
        stopped = True
    return before, inside, observe(ddp), filters == list(warnings.filters), stopped


def test_every_way_out_leaves_the_module_and_the_filters_as_they_were() -> None:
    for left in run_ranks(all_leaving, 2, timeout_s=60):
        assert len(left) == len(MODES) * len(WAYS_OUT)
        for (way, mode), (before, inside, after, same_filters, stopped) in left.items():
            assert inside["config"][0] == (way != "disabled"), mode
            assert after == before, (way, mode)
            assert same_filters, (way, mode)
            assert stopped == (way in ("error", "throw")), mode


def unentered(rank: int, world_size: int) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    before = observe(ddp)
    stagereg.Join([ddp, lambda: None])
    after = observe(ddp)
    loss = ddp(batch(rank, 0, 0)).sum() if rank == 0 else None  # alone: nothing announces
    return before, after, loss is None


def test_a_join_that_is_not_entered_has_no_hooks_and_no_configuration() -> None:
    for before, after, _ in run_ranks(unentered, 2, timeout_s=30):
        for mark in ("config", "hooks", "module hooks"):
            assert after[mark] == before[mark]


def afterwards(rank: int, world_size: int) -> Any:
    """Gradients of a plain loop after a join that divided by the active ranks, the last of which was alone."""
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    with stagereg.Join([ddp], divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
    ddp.zero_grad()
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    return next(ddp.parameters()).grad.item()


def test_training_after_a_join_averages_over_the_world_again() -> None:
    assert run_ranks(afterwards, 2, timeout_s=30) == [1.5, 1.5]


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


def failing_exit(rank: int, world_size: int) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    before = observe(ddp)
    joinables = [Clumsy(), ddp, Clumsy()]
    with contextlib.suppress(OSError), stagereg.Join(joinables):
        pass
    return before, observe(ddp), [joinable._join_config.enable for joinable in joinables]


def test_a_joinable_that_fails_to_leave_does_not_keep_the_others_in() -> None:
    for before, after, enabled in run_ranks(failing_exit, 2, timeout_s=30):
        assert after == before
        assert enabled == [False, False, False]
