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

from ..kernel.simulated import SimulatedChannel, Simulation

SEVERAL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SEVERAL
@given(sums=st.lists(st.integers(0, 5), min_size=1, max_size=40), twice=st.booleans(), seed=st.integers(0, 999))
@example(sums=[0, 3, 1, 3] * 16, twice=True, seed=0)
@example(sums=[2] * 64, twice=False, seed=0)
def test_sums_are_over_the_ranks_that_still_request(sums: list[int], twice: bool, seed: int) -> None:
    """Rank r requests ``sums[r]`` times, and answers from then on if others may request more often."""

    def act(rank: int) -> list[list[float]]:
        responder = Responder(simulation.channel(rank, "responder"), 2, simulation.waiting)
        results = [responder.request(rank + 1.0, 100.0 * number) for number in range(sums[rank])]
        if sums[rank] < max(sums):
            responder.start()
            if twice:
                responder.start()
        responder.close()
        return results

    simulation = Simulation(len(sums), seed)
    results = simulation.run(act)
    for rank, found in enumerate(results):
        asking = [[other for other, count in enumerate(sums) if count > number] for number in range(sums[rank])]
        assert found == [[sum(r + 1.0 for r in ranks), 100.0 * i * len(ranks)] for i, ranks in enumerate(asking)]


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


def on_ranks(size: int, act: Callable[[int, Responder, SimulatedChannel], Any], follow: Any = None) -> list[Any]:
    """Run ``act`` on each rank; ``follow`` makes what a rank does after each request that it answers."""
    simulation = Simulation(size)

    def run(rank: int) -> Any:
        channel = simulation.channel(rank, "responder")
        more = {} if follow is None else {"follow": follow(rank, channel)}
        return act(rank, Responder(channel, 0, simulation.waiting, **more), channel)

    return simulation.run(run)


@given(calls=st.lists(st.integers(0, 5), min_size=1, max_size=5), again=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_requests_reach_all_ranks_also_those_that_left(calls: list[int], again: bool, seed: int) -> None:
    """Rank r makes ``calls[r]`` requests, each with a gather, and answers from then on; in two joins if ``again``."""

    def act(rank: int, responder: Responder, channel: SimulatedChannel) -> list[list[Any]]:
        results = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            for i in range(lengths[rank]):
                responder.request()
                results.append(channel.gather((rank, epoch, i)))
            if random.Random(seed + rank).random() < 0.5:
                responder.start()
            responder.close()
        return results

    results = on_ranks(len(calls), act, lambda rank, channel: lambda: channel.gather((rank, "left")))
    for rank, mine in enumerate(results):
        wanted = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            for i in range(lengths[rank]):
                wanted.append([(r, epoch, i) if lengths[r] > i else (r, "left") for r in range(len(calls))])
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
    assert "passed over an empty batch" in text


def test_what_a_rank_waits_for_is_named() -> None:
    waited: list[str] = []
    simulation = Simulation(1)

    def waiting(ready: Callable[[float], bool], what: str) -> None:
        waited.append(what)
        simulation.waiting(ready, what)

    def act(rank: int) -> None:
        responder = Responder(simulation.channel(rank, "responder"), 0, waiting)
        responder.request()
        responder.close()

    simulation.run(act)
    assert waited == ["join.mean", "the end of the join"]
