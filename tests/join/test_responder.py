"""Ranks in a loop send requests; ranks that have left it answer; all end together."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagereg.errors import JoinError
from stagereg.join.responder import GatherResponder, SumResponder
from stagereg.kernel.channel import PendingSum, control_channel
from stagereg.testing import run_ranks

from ..kernel.simulated import Simulation

SEVERAL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SEVERAL
@given(sums=st.lists(st.integers(0, 5), min_size=1, max_size=40), twice=st.booleans(), seed=st.integers(0, 999))
@example(sums=[0, 3, 1, 3] * 16, twice=True, seed=0)
@example(sums=[2] * 64, twice=False, seed=0)
def test_sums_are_those_of_the_ranks_that_still_request_whoever_has_left(
    sums: list[int], twice: bool, seed: int
) -> None:
    """Rank r requests ``sums[r]`` times, and answers from then on if others may request more often."""

    def act(rank: int) -> list[list[float]]:
        responder = SumResponder(simulation.channel(rank, "responder"), 2, simulation.waiting)
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
        responder = SumResponder(simulation.channel(rank, "responder"), 1, simulation.waiting)
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


class Broken:
    """A channel whose sums fail."""

    rank, size = 0, 2

    def add(self, values: object) -> Broken:
        return self

    def gather(self, thing: object) -> list[object]:
        raise NotImplementedError

    def submit(self, job: Callable[[], None]) -> None:
        threading.Thread(target=job, daemon=True).start()

    def ready(self, seconds: float) -> bool:
        raise ConnectionError("the peer is gone")

    def wait(self) -> list[float]:
        raise ConnectionError("the peer is gone")


def test_what_a_sum_fails_with_is_raised_where_it_was_requested() -> None:
    with pytest.raises(ConnectionError, match="the peer is gone"):
        SumResponder(Broken(), 1).request(1.0)


def test_what_answering_fails_with_is_raised_at_the_end() -> None:
    responder = SumResponder(Broken(), 1)
    responder.start()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        responder.close()


def test_what_is_waited_for_is_named() -> None:
    waited_for = []

    def waiting(ready: object, what: str) -> None:
        waited_for.append(what)

    def act(rank: int) -> None:
        responder = SumResponder(simulation.channel(rank, "responder"), 1, waiting)
        responder.request(1.0)
        responder.close()

    simulation = Simulation(1)
    simulation.run(act)
    assert waited_for == ["join.mean", "the end of the join"]


PATIENCE_S = 20.0


class Exchange:
    """What the channels of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.filled = threading.Barrier(size)
        self.taken = threading.Barrier(size)
        self.rounds = 0


class ThreadChannel:
    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, exchange.size

    def add(self, values: Any) -> PendingSum:
        raise NotImplementedError

    def submit(self, job: Callable[[], None]) -> None:
        threading.Thread(target=job, daemon=True).start()

    def gather(self, thing: Any) -> list[Any]:
        self.exchange.table[self.rank] = thing
        if self.exchange.filled.wait(PATIENCE_S) == 0:
            self.exchange.rounds += 1
        things = list(self.exchange.table)
        self.exchange.taken.wait(PATIENCE_S)
        return things


def on_ranks(size: int, act: Callable[[int, GatherResponder], Any]) -> tuple[list[Any], int]:
    """Run ``act`` on each rank's responder, in a thread a rank; return the results and the number of gathers."""
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(act, rank, GatherResponder(ThreadChannel(exchange, rank))) for rank in range(size)]
        return [future.result(PATIENCE_S) for future in futures], exchange.rounds


@given(calls=st.lists(st.integers(0, 5), min_size=1, max_size=5), again=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_requests_reach_all_ranks_whoever_has_left(calls: list[int], again: bool, seed: int) -> None:
    """Rank r makes ``calls[r]`` calls and answers from then on, in two joins if ``again``."""

    def act(rank: int, responder: GatherResponder) -> list[list[Any]]:
        results = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            results += [responder.request((rank, epoch, i)) for i in range(lengths[rank])]
            if random.Random(seed + rank).random() < 0.5 or lengths[rank] < max(lengths):
                responder.start(partial(tuple, (rank, epoch, "left")))
            responder.close()
        return results

    results, _ = on_ranks(len(calls), act)
    for rank, mine in enumerate(results):
        wanted = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            for i in range(lengths[rank]):
                wanted.append([(r, epoch, i if lengths[r] > i else "left") for r in range(len(calls))])
        assert mine == wanted


def test_an_answer_is_made_anew_after_each_result() -> None:
    results_seen: list[Any] = []

    def act(rank: int, responder: GatherResponder) -> list[Any]:
        results = []
        if rank == 0:
            responder.start(lambda: len(results_seen), results_seen.append)
        else:
            results = [responder.request("now")[0] for _ in range(3)]
        responder.close()
        return results

    (_, results), _ = on_ranks(2, act)
    assert results == [0, 1, 2]
    assert results_seen == [[i, "now"] for i in range(3)]


def test_ranks_that_all_answer_do_not_gather_without_end() -> None:
    def act(rank: int, responder: GatherResponder) -> None:
        responder.start(lambda: None)
        responder.close()

    _, rounds = on_ranks(3, act)
    assert rounds == 2  # what the answers met, and the end


def test_what_an_answer_fails_with_is_raised_by_close() -> None:
    responder = GatherResponder(ThreadChannel(Exchange(1), 0))
    responder.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        responder.close()


def test_a_rank_that_answers_cannot_request() -> None:
    def act(rank: int, responder: GatherResponder) -> str:
        responder.start(lambda: None)
        with pytest.raises(JoinError) as caught:
            responder.request(None)
        responder.close()
        return str(caught.value)

    (text,), _ = on_ranks(1, act)
    assert "answers requests by itself" in text


def test_a_request_after_another_rank_has_ended_is_an_error() -> None:
    def act(rank: int, responder: GatherResponder) -> str:
        text = ""
        if rank == 1:
            with pytest.raises(JoinError) as caught:
                responder.request(None)
            text = str(caught.value)
        responder.close()
        return text

    results, _ = on_ranks(3, act)
    assert results[1].startswith("rank 0, 2 ended the join while this rank still requests")


def over_gloo(rank: int, world_size: int) -> list[Any]:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    responder = GatherResponder(control_channel(dist.group.WORLD, "responder"))
    results = [responder.request(f"{rank}.{i}") for i in range(rank)]
    responder.start(lambda: f"{rank} left")
    responder.close()
    return results


def test_requests_go_over_process_groups() -> None:
    assert run_ranks(over_gloo, 3, timeout_s=30) == [
        [],
        [["0 left", "1.0", "2.0"]],
        [["0 left", "1.0", "2.0"], ["0 left", "1 left", "2.1"]],
    ]
