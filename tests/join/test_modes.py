"""Planned and counted joins give the numbers that torch's wire gives, and send what they say and no more."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.errors import JoinError
from stagereg.testing import run_ranks

from .reference import EXACT, Case, batch, difference, expected, mlp, net, train
from .test_numbers import CASES

MODES = ["planned", "counted"]


def all_of_them(rank: int, world_size: int, mode: str) -> dict[str, Any]:
    """Every case of one world size, in the same processes, so that a trace of one shows in the next."""
    return {
        name: train(rank, world_size, case, mode) for name, case in CASES.items() if len(case.lengths) == world_size
    }


@functools.cache
def outcomes(mode: str, world_size: int) -> list[dict[str, Any]]:
    return run_ranks(all_of_them, world_size, args=(mode,), timeout_s=100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_the_references_numbers_on_every_rank(name: str, mode: str) -> None:
    for outcome in outcomes(mode, len(CASES[name].lengths)):
        assert difference(outcome[name], expected(CASES[name])) < EXACT


def broken(
    rank: int, world_size: int, mode: str, announced: tuple[int, ...], taken: tuple[int, ...], divide: bool
) -> Any:
    """Rank r announces so many batches and takes so many steps."""
    ddp = DistributedDataParallel(net(Case()))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    with stagereg.Join([ddp, optimizer], mode=mode, loader=range(announced[rank]), divide_by_initial_world_size=divide):
        for step in range(taken[rank]):
            optimizer.zero_grad()
            ddp(batch(rank, 0, step)).sum().backward()
            optimizer.step()
    state = optimizer.state_dict()["state"]
    return [p.detach() for p in ddp.parameters()], {(i, k): v for i, s in state.items() for k, v in s.items()}


def single(taken: tuple[int, ...], divide: bool) -> Any:
    module = net(Case())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for step in range(max(taken)):
        active = [rank for rank, length in enumerate(taken) if length > step]
        optimizer.zero_grad()
        for rank in active:
            (module(batch(rank, 0, step)).sum() / (len(taken) if divide else len(active))).backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return [p.detach() for p in module.parameters()], {(i, k): v for i, s in state.items() for k, v in s.items()}


PLANS = {
    "one leaves early": ((4, 4, 4), (4, 2, 4)),
    "all leave early": ((6, 5, 4), (2, 2, 2)),
    "the longest leaves early": ((2, 3, 8), (2, 3, 5)),
    "one goes on for longer": ((2, 3, 3), (5, 3, 3)),
    "all go on for longer": ((1, 1, 1), (2, 4, 3)),
    "one never begins": ((3, 3, 3), (3, 0, 2)),
    "nobody begins": ((3, 3, 3), (0, 0, 0)),
}


def all_plans(rank: int, world_size: int, mode: str) -> dict[Any, Any]:
    return {
        (name, divide): broken(rank, world_size, mode, *PLANS[name], divide)
        for name in PLANS
        for divide in (True, False)
    }


@functools.cache
def plans(mode: str) -> list[dict[Any, Any]]:
    return run_ranks(all_plans, 3, args=(mode,), timeout_s=60)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_what_ranks_do_counts_and_not_what_they_announced(name: str, divide: bool, mode: str) -> None:
    for outcome in plans(mode):
        assert difference(list(outcome[name, divide]), list(single(PLANS[name][1], divide))) < EXACT


class Calls:
    """Counts the collectives that Python asks for, by whether they block; buckets are DDP's own, in C++."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []

    def __enter__(self) -> Calls:
        self._before = {
            name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather_object", "barrier")
        }
        for name, function in self._before.items():
            setattr(dist, name, self._noting(name, function))
        return self

    def __exit__(self, *raised: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)

    def _noting(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, bool(kwargs.get("async_op"))))
            return function(*args, **kwargs)

        return noted


def counted(rank: int, world_size: int, mode: str, throw: bool, way: str) -> list[tuple[str, bool]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp().double())
    data = [batch(rank, 0, step) for step in range(9)]
    made: list[tuple[str, bool]] = []
    join = stagereg.Join([ddp], throw_on_early_termination=throw, mode=mode, loader=data)
    with join:
        for step, x in enumerate(join.iterate(data) if way == "iterate" else data):
            with Calls() as calls:
                loss = ddp(x).sum()
                if way == "iterate":
                    loss = join.mean(loss, len(x), over="world")
                loss.backward()
            if step >= 3:  # DDP has rebuilt its buckets
                made += calls.made
    return made


@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize("throw", [False, True])
def test_a_planned_step_has_no_collective_and_a_counted_one_has_one_that_nobody_waits_for(
    throw: bool, way: str
) -> None:
    for made in run_ranks(counted, 2, args=("planned", throw, way), timeout_s=30):
        assert made == []
    for made in run_ranks(counted, 2, args=("counted", throw, way), timeout_s=30):
        assert made == [("all_reduce", True)] * 6


def lengthless(rank: int, world_size: int, mode: str | None, way: str) -> str:
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


@pytest.mark.parametrize("way", ["plain", "iterate"])
def test_a_plan_needs_every_ranks_length_and_auto_counts_without(way: str) -> None:
    for said in run_ranks(lengthless, 3, args=("planned", way), timeout_s=30):
        assert "that of rank 1 has none" in said
        assert "join.mode=counted" in said
    assert run_ranks(lengthless, 3, args=("auto", way), timeout_s=30) == ["Join"] * 3


def unplanned(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(mlp().double())
    try:
        with stagereg.Join([ddp], mode="planned"):
            ddp(batch(rank, 0, 0)).sum().backward()
    except JoinError as error:
        return str(error)
    return ""


def test_a_planned_join_that_knows_no_loader_says_how_to_give_it_one() -> None:
    for said in run_ranks(unplanned, 2, timeout_s=30):
        assert "join.iterate(loader)" in said
        assert "loader=loader" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "plannd"}, "Did you mean 'planned'"),
        ({"average": "sample"}, "Did you mean 'samples'"),
        ({"timeout": 0}, "join.timeout must be a number of seconds above 0"),
    ],
)
def test_a_wrong_option_is_refused_with_the_nearest_name(options: dict[str, Any], words: str) -> None:
    tally = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce"}])
    with pytest.raises(JoinError, match=words):
        stagereg.Join([tally], **options)
