"""With throw, a join stops all ranks at the same step, with one error class that names the exhausted rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from ..support.reference import Case, batch, join_of, net
from ..testing.join_mutants import Sum


def throwing(rank: int, lengths: tuple[int, ...], first: str, library: str) -> Any:
    """The steps that this rank has begun and ended, and its error's type, text and rank."""
    ddp = DistributedDataParallel(net(Case()))
    adam = torch.optim.Adam(ddp.parameters(), lr=0.1)
    total = Sum()
    kind, options = join_of("torch" if library == "mixed" and rank == 0 else library, range(lengths[rank]))
    begun = steps = 0
    error = None
    try:
        listed = [total] * (first == "sum") + [ddp] + [adam] * (kind is stagereg.Join)
        with kind(listed, throw_on_early_termination=True, **options):
            for step in range(lengths[rank]):
                begun += 1
                if first == "sum":
                    total.add(0.0)
                ddp(batch(rank, 0, step)).sum().backward()
                adam.step()
                steps += 1
    except RuntimeError as caught:
        error = caught
    return begun, steps, type(error), str(error), getattr(error, "rank", None)


SOME = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
CASES: dict[tuple[tuple[int, ...], str, str], list[tuple[int, str, int | None]]] = {
    ((4, 2, 6), "ddp", "ours"): [(2, SOME, None), (2, "Rank 1 exhausted all inputs.", 1), (2, SOME, None)],
    ((4, 2, 6), "sum", "ours"): [(2, SOME, None), (2, "Rank 1 exhausted all inputs.", 1), (2, SOME, None)],
    ((2, 5, 2), "ddp", "ours"): [(2, "Rank 0", 0), (2, SOME, None), (2, "Rank 2", 2)],
    ((3, 3, 0), "ddp", "ours"): [(0, SOME, None), (0, SOME, None), (0, "Rank 2", 2)],
    ((3, 3, 3), "ddp", "ours"): [(3, "", None)] * 3,
    ((4, 2, 3), "ddp", "counted"): [(2, "exhausted all inputs", rank) for rank in (None, 1, None)],
    ((4, 2, 3), "ddp", "planned"): [(0, "rank 0 has 4, rank 1 has 2, rank 2 has 3 batches", 1)] * 3,
    ((2, 4, 6), "ddp", "mixed"): [(2, "Rank 0", None), (2, SOME, None), (2, SOME, None)],
    ((6, 4, 2), "ddp", "mixed"): [(2, SOME, None), (2, SOME, None), (2, "Rank 2", 2)],
}
"""By lengths, first joinable and library: each rank's steps, what its error says, and the rank in it."""


def all_throwing(rank: int, world_size: int) -> list[Any]:
    return [throwing(rank, *case) for case in CASES]


def test_all_ranks_stop_at_one_step_and_name_who_ran_out() -> None:
    for here, outcomes in enumerate(run_ranks(all_throwing, 3, timeout_s=60)):
        for (case, right), (begun, steps, kind, text, rank) in zip(CASES.items(), outcomes, strict=True):
            assert steps == right[here][0], case
            assert case[2] != "planned" or not begun, case
            assert right[here][1] in text, case
            assert right[here][2] == rank, case
            ours = type(None) if len(set(case[0])) == 1 else stagereg.UnevenInputsError
            assert kind == (RuntimeError if case[2] == "mixed" and here == 0 else ours), case


class Longer(list[torch.Tensor]):
    """A loader with a length that it does not have on rank 1."""

    def __len__(self) -> int:
        return 4


def ending_early(rank: int, world_size: int) -> tuple[int, str, bool]:
    ddp = DistributedDataParallel(net(Case()))
    steps = 0
    try:
        with stagereg.Join([ddp], throw_on_early_termination=True, mode="planned") as join:
            for x in join.iterate(Longer(batch(rank, 0, step) for step in range(2 if rank == 1 else 4))):
                ddp(x).sum().backward()
                steps += 1
    except stagereg.UnevenInputsError as error:
        return steps, str(error), error.__suppress_context__ or error.__context__ is None
    return steps, "", False


def test_a_rank_that_ends_before_its_length_is_the_same_error_on_all() -> None:
    said = "Rank 1 exhausted all inputs after 2 steps, but other ranks have more."
    assert run_ranks(ending_early, 3) == [(2, said, True)] * 3


DDPS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "static_graph": True},
]


def counting(rank: int, world_size: int) -> list[tuple[int, type]]:
    """Steps and error of one join after another; before some of them, each module has been trained outside a join."""
    seen = []
    for options in DDPS:
        for before in (0, 1, 2):
            ddp = DistributedDataParallel(net(Case()), **options)
            for step in range(before):
                ddp(batch(rank, 1, step)).sum().backward()
            steps, error = 0, None
            try:
                with stagereg.Join([ddp], throw_on_early_termination=True, mode="counted", timeout=10.0):
                    for step in range((1, 3)[rank]):
                        ddp(batch(rank, 0, step)).sum().backward()
                        steps += 1
            except RuntimeError as caught:
                error = caught
            seen.append((steps, type(error)))
    return seen


def test_counted_ranks_stop_before_ddp_arranges_its_buckets_anew() -> None:
    """Which it does once, by a collective at the beginning of a forward, in the second step of most modules."""
    for outcomes in run_ranks(counting, 2, timeout_s=60):
        assert outcomes == [(1, stagereg.UnevenInputsError)] * (3 * len(DDPS))
