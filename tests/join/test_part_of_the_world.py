"""A process group of some ranks: two models, a sum over ranks and a function with a collective of its own are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import EXACT, Case, batch, difference, net, sharded_adam
from ..testing.join_mutants import Sum


def in_a_part(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[Any]:
    """All ranks but the first train."""
    group = dist.new_group(list(range(1, world_size)))
    return [two_models(rank - 1, lengths, divide, group) for divide in (True, False)] if rank else []


def two_models(rank: int, lengths: tuple[int, ...], divide: bool, group: Any) -> Any:
    """The parameters of both models at the end, the totals of each step and of the join, and the sums of a function."""
    total = Sum(group)
    one, two = (DistributedDataParallel(net(Case()), process_group=group) for _ in range(2))
    first = torch.optim.Adam(one.parameters(), lr=0.05)
    second = sharded_adam(two, process_group=group, lr=0.05)
    totals, sums = [], []

    def advance() -> None:
        first.step()
        ranks = torch.ones(())
        dist.all_reduce(ranks, group=group)
        sums.append(ranks.item())

    with stagereg.Join([one, total, advance, two, second], divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            first.zero_grad()
            one(batch(rank, 0, step)).sum().backward()
            total.add(1.0 + step)
            advance()
            second.zero_grad()
            two(batch(rank, 1, step)).square().sum().backward()
            second.step()
            totals.append(total.total.item())
    params = [param.detach() for model in (one, two) for param in model.parameters()]
    return params, [*totals, total.total.item()], sums


def in_one_process(lengths: tuple[int, ...], divide: bool) -> list[torch.Tensor]:
    one, two = net(Case()), net(Case())
    first, second = (torch.optim.Adam(model.parameters(), lr=0.05) for model in (one, two))
    for step in range(max(lengths)):
        active = [rank for rank, length in enumerate(lengths) if length > step]
        divisor = len(lengths) if divide else len(active)
        first.zero_grad()
        second.zero_grad()
        for rank in active:
            (one(batch(rank, 0, step)).sum() / divisor).backward()
            (two(batch(rank, 1, step)).square().sum() / divisor).backward()
        first.step()
        second.step()
    return [param.detach() for model in (one, two) for param in model.parameters()]


def test_what_a_part_of_the_world_joins_is_right() -> None:
    lengths = (1, 4, 2)  # so three ranks add 1, two add 2, one adds 3, one adds 4
    right_totals = [3.0, 3.0 + 4.0, 3.0 + 4.0 + 3.0, 3.0 + 4.0 + 3.0 + 4.0]
    right = [in_one_process(lengths, divide) for divide in (True, False)]
    for length, outcomes in zip(lengths, run_ranks(in_a_part, 4, args=(lengths,), timeout_s=30)[1:], strict=True):
        for (params, totals, sums), wanted in zip(outcomes, right, strict=True):
            assert difference(params, wanted) < EXACT
            assert totals == [*right_totals[:length], right_totals[-1]]
            assert sums == [3.0] * max(lengths)  # ranks without data run the function too


def uneven_in_a_part(rank: int, world_size: int, mode: str) -> tuple[str, int | None] | None:
    """Rank 2 has one batch, rank 1 has two; rank 0 takes no part."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = DistributedDataParallel(net(Case()), process_group=group)
    try:
        with stagereg.Join([model], throw_on_early_termination=True, mode=mode) as join:
            for step in join.iterate([0, 1][: 3 - rank]):
                model(batch(rank, 0, step)).sum().backward()
    except stagereg.UnevenInputsError as error:
        return str(error), error.rank
    return None


@pytest.mark.parametrize("mode", ["planned", "counted", "torch"])
def test_uneven_ranks_of_a_part_are_named_as_in_the_world(mode: str) -> None:
    _, first, second = run_ranks(uneven_in_a_part, 3, args=(mode,), timeout_s=30)
    named = "rank 1 has 2, rank 2 has 1" if mode == "planned" else "Rank 2 exhausted all inputs"
    assert named in second[0]
    assert second[1] == 2
    assert mode == "torch" or named in first[0]
