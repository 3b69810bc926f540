"""With throw, a join stops all ranks at the same step, with one error class that names the exhausted rank."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.testing import run_ranks

from .reference import Case, batch, net


def throwing(rank: int, world_size: int, lengths: tuple[int, ...], first: str, library: str) -> Any:
    ddp = DistributedDataParallel(net(Case()))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    joinable = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce"}])
    torchs = library == "mixed" and rank == 0
    joinables = {"ddp": [ddp, zero], "collective": [joinable, ddp, zero]}[first]
    steps = 0
    error = None
    try:
        with (TorchJoin if torchs else stagereg.Join)(joinables, throw_on_early_termination=True):
            for step in range(lengths[rank]):
                if first == "collective":
                    joinable(torch.zeros(()))
                ddp(batch(rank, 0, step)).sum().backward()
                zero.step()
                steps += 1
    except RuntimeError as caught:
        error = caught
    leftover = ddp._join_config.enable and not torchs
    return steps, type(error), str(error), getattr(error, "rank", None), leftover


@pytest.mark.parametrize("first", ["ddp", "collective"])
def test_all_ranks_stop_at_the_shortest_length(first: str) -> None:
    outcomes = run_ranks(throwing, 3, args=((4, 2, 6), first, "ours"), timeout_s=30)
    assert [steps for steps, *_ in outcomes] == [2, 2, 2]
    assert {kind for _, kind, *_ in outcomes} == {stagereg.UnevenInputsError}
    assert [text for _, _, text, *_ in outcomes] == [
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        "Rank 1 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]
    assert [rank for *_, rank, _ in outcomes] == [None, 1, None]
    assert not any(leftover for *_, leftover in outcomes)


ENDS = {(2, 5, 2): [(2, 0), (2, None), (2, 2)], (3, 0): [(0, None), (0, 1)], (3, 3): [(3, None)] * 2}
"""By the lengths of the ranks: how many steps each takes, and which rank it says has run out."""


@pytest.mark.parametrize("lengths", ENDS)
def test_the_ranks_that_run_out_are_named_on_themselves(lengths: tuple[int, ...]) -> None:
    outcomes = run_ranks(throwing, len(lengths), args=(lengths, "ddp", "ours"), timeout_s=30)
    assert [(steps, rank) for steps, _, _, rank, _ in outcomes] == ENDS[lengths]
    kind = stagereg.UnevenInputsError if len(set(lengths)) > 1 else type(None)
    assert {outcome[1] for outcome in outcomes} == {kind}


@pytest.mark.parametrize("lengths", [(2, 4, 6), (6, 4, 2)])
def test_ranks_with_torchs_join_stop_at_the_same_step(lengths: tuple[int, ...]) -> None:
    outcomes = run_ranks(throwing, 3, args=(lengths, "ddp", "mixed"), timeout_s=30)
    assert [steps for steps, *_ in outcomes] == [2, 2, 2]
    assert [kind for _, kind, *_ in outcomes] == [RuntimeError] + [stagereg.UnevenInputsError] * 2


def test_the_error_is_torchs_type_too_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(stagereg.UnevenInputsError("Rank 1 exhausted all inputs.", rank=1)))
    assert isinstance(error, RuntimeError)
    assert (str(error), error.rank) == ("Rank 1 exhausted all inputs.", 1)


def other_error(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(net(Case()))
    with pytest.raises(RuntimeError) as caught, stagereg.Join([ddp], throw_on_early_termination=True):
        raise RuntimeError("of the loop's own")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_loop_is_not_changed() -> None:
    assert run_ranks(other_error, 2, timeout_s=30) == ["RuntimeError: of the loop's own"] * 2


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
