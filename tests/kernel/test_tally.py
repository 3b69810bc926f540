"""Ranks in a loop sum a few numbers; those that have left it count as zeros, and all of them end together."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagereg.join.tally import SumResponder

from .simulated import Simulation, answering

SEVERAL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SEVERAL
@given(sums=st.lists(st.integers(0, 5), min_size=1, max_size=40), twice=st.booleans(), seed=st.integers(0, 999))
@example(sums=[0, 3, 1, 3] * 16, twice=True, seed=0)
@example(sums=[2] * 64, twice=False, seed=0)
def test_sums_are_those_of_the_ranks_that_still_ask_whoever_has_left(sums: list[int], twice: bool, seed: int) -> None:
    """Rank r asks ``sums[r]`` times, and answers from then on if others may ask more often."""

    def act(rank: int) -> list[list[float]]:
        tally = SumResponder(simulation.channel(rank, "tally"), 2, simulation.waiting)
        told = [tally.request(rank + 1.0, 100.0 * number) for number in range(sums[rank])]
        if sums[rank] < max(sums):
            tally.start()
            if twice:
                tally.start()
        tally.close()
        return told

    simulation = Simulation(len(sums), seed)
    with answering():
        results = simulation.run(act)
    for rank, told in enumerate(results):
        asking = [[other for other, count in enumerate(sums) if count > number] for number in range(sums[rank])]
        assert told == [[sum(r + 1.0 for r in ranks), 100.0 * i * len(ranks)] for i, ranks in enumerate(asking)]


@SEVERAL
@given(leave=st.lists(st.booleans(), min_size=1, max_size=20), seed=st.integers(0, 999))
def test_nobody_passes_the_end_before_all_ranks_have_come_to_it(leave: list[bool], seed: int) -> None:
    came: list[int] = []

    def act(rank: int) -> int:
        tally = SumResponder(simulation.channel(rank, "tally"), 1, simulation.waiting)
        if leave[rank]:
            tally.start()
        simulation.pause()
        came.append(rank)
        tally.close()
        return len(came)

    simulation = Simulation(len(leave), seed)
    with answering():
        passed = simulation.run(act)
    if not all(leave):  # ranks that all serve have nothing to wait for
        closing = sum(not left for left in leave)
        assert min(passed) >= closing


class Broken:
    """A channel whose sums fail."""

    rank, size = 0, 2

    def add(self, values: object) -> Broken:
        return self

    def gather(self, thing: object) -> list[object]:
        raise NotImplementedError

    def ready(self, seconds: float) -> bool:
        raise ConnectionError("the peer is gone")

    def wait(self) -> list[float]:
        raise ConnectionError("the peer is gone")


def test_what_a_sum_fails_with_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ConnectionError, match="the peer is gone"):
        SumResponder(Broken(), 1).request(1.0)


def test_what_answering_fails_with_is_raised_at_the_end() -> None:
    tally = SumResponder(Broken(), 1)
    tally.start()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        tally.close()


def test_what_is_waited_for_is_told() -> None:
    told = []

    def waiting(ready: object, what: str) -> None:
        told.append(what)

    def act(rank: int) -> None:
        tally = SumResponder(simulation.channel(rank, "tally"), 1, waiting)
        tally.request(1.0)
        tally.close()

    simulation = Simulation(1)
    simulation.run(act)
    assert told == ["join.mean", "the end of the join"]
