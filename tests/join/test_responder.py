"""Ranks in a loop send requests; ranks that have left it answer; all end together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import JoinError
from stagereg.join.responder import Responder

from ..support.examples import examples
from ..support.simulated import SimulatedChannel, Simulation

SEVERAL = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SEVERAL
@given(leave=st.lists(st.booleans(), min_size=1, max_size=20), seed=st.integers(0, 999))
def test_no_rank_passes_the_end_before_all_have_reached_it(leave: list[bool], seed: int) -> None:
    came: list[int] = []

    def act(rank: int) -> int:
        responder = Responder(simulation.channel(rank, "responder"), 1, simulation.waiting)
        if leave[rank]:
            responder.start()
        simulation.pause()
        came.append(rank)
        responder.close()
        return len(came)

    simulation = Simulation(len(leave), seed)
    passed = simulation.run(act)
    if not all(leave):  # ranks that all answer have nothing to wait for
        closing = sum(not left for left in leave)
        assert min(passed) >= closing


def on_ranks(
    size: int,
    act: Callable[[int, Responder, SimulatedChannel], Any],
    follow: Any = None,
    columns: int = 0,
    seed: int = 0,
) -> list[Any]:
    """Run ``act`` on each rank; ``follow`` makes what a rank does after each request that it answers."""
    simulation = Simulation(size, seed)

    def run(rank: int) -> Any:
        channel = simulation.channel(rank, "responder")
        more = {} if follow is None else {"follow": follow(rank, channel)}
        return act(rank, Responder(channel, columns, simulation.waiting, **more), channel)

    return simulation.run(run)


@SEVERAL
@given(calls=st.lists(st.integers(0, 5), min_size=1, max_size=40), again=st.booleans(), seed=st.integers(0, 99))
@example(calls=[0, 3, 1, 3] * 16, again=True, seed=0)
@example(calls=[2] * 64, again=False, seed=0)
def test_sums_are_over_the_ranks_that_ask_and_reach_all(calls: list[int], again: bool, seed: int) -> None:
    """Rank r makes ``calls[r]`` requests, each with a gather, and answers from then on; in two joins if ``again``."""
    joins = [calls, calls[::-1]][: 1 + again]

    def act(rank: int, responder: Responder, channel: SimulatedChannel) -> list[Any]:
        results = []
        for epoch, lengths in enumerate(joins):
            for i in range(lengths[rank]):
                sums = responder.request(rank + 1.0, 100.0 * i)
                results.append((sums, channel.gather((rank, epoch, i))))
            for _ in range(random.Random(seed + rank).randrange(3)):
                responder.start()
            responder.close()
        return results

    found = on_ranks(len(calls), act, lambda rank, channel: lambda: channel.gather((rank, "left")), 2, seed)
    for rank, mine in enumerate(found):
        wanted = []
        for epoch, lengths in enumerate(joins):
            for i in range(lengths[rank]):
                asking = [r for r, length in enumerate(lengths) if length > i]
                gathered = [(r, epoch, i) if r in asking else (r, "left") for r in range(len(calls))]
                wanted.append(([sum(r + 1.0 for r in asking), 100.0 * i * len(asking)], gathered))
        assert mine == wanted


def test_the_error_of_what_follows_a_request_is_raised_by_close() -> None:
    def act(rank: int, responder: Responder, channel: SimulatedChannel) -> str:
        if rank == 0:
            responder.request()
            return ""
        with pytest.raises(ZeroDivisionError):
            responder.close()
        return "raised"

    assert on_ranks(2, act, lambda rank, channel: lambda: 1 / 0) == ["", "raised"]


def test_a_rank_that_answers_cannot_request() -> None:
    def act(rank: int, responder: Responder, channel: SimulatedChannel) -> str:
        responder.start()
        with pytest.raises(JoinError) as caught:
            responder.request()
        responder.close()
        return str(caught.value)

    (text,) = on_ranks(1, act)
    assert "skipped an empty batch" in text
