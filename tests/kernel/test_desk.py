"""Ranks in a loop call on all ranks; those that have left it answer, and all of them end together."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.errors import JoinError
from stagereg.join.desk import GatherResponder
from stagereg.kernel.channel import PendingSum, control_channel
from stagereg.testing import run_ranks

PATIENCE_S = 20.0


class Room:
    """What the lines of one process share: a table on which every rank lays something, and two doors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.filled = threading.Barrier(size)
        self.taken = threading.Barrier(size)
        self.rounds = 0


class ThreadLine:
    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size

    def add(self, values: Any) -> PendingSum:
        raise NotImplementedError

    def gather(self, thing: Any) -> list[Any]:
        self.room.table[self.rank] = thing
        if self.room.filled.wait(PATIENCE_S) == 0:
            self.room.rounds += 1
        things = list(self.room.table)
        self.room.taken.wait(PATIENCE_S)
        return things


def on_ranks(size: int, act: Callable[[int, GatherResponder], Any]) -> tuple[list[Any], int]:
    """Run ``act`` on each rank's desk, in a thread a rank; return the results and the number of gathers."""
    room = Room(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(act, rank, GatherResponder(ThreadLine(room, rank))) for rank in range(size)]
        return [future.result(PATIENCE_S) for future in futures], room.rounds


@given(calls=st.lists(st.integers(0, 5), min_size=1, max_size=5), again=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_calls_reach_all_ranks_whoever_has_left(calls: list[int], again: bool, seed: int) -> None:
    """Rank r makes ``calls[r]`` calls and answers from then on, in two joins if ``again``."""

    def act(rank: int, desk: GatherResponder) -> list[list[Any]]:
        results = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            results += [desk.request((rank, epoch, i)) for i in range(lengths[rank])]
            if random.Random(seed + rank).random() < 0.5 or lengths[rank] < max(lengths):
                desk.start(partial(tuple, (rank, epoch, "left")))
            desk.close()
        return results

    results, _ = on_ranks(len(calls), act)
    for rank, mine in enumerate(results):
        wanted = []
        for epoch in range(1 + again):
            lengths = calls if epoch == 0 else calls[::-1]
            for i in range(lengths[rank]):
                wanted.append([(r, epoch, i if lengths[r] > i else "left") for r in range(len(calls))])
        assert mine == wanted


def test_an_answer_is_asked_for_anew_after_each_call_is_heard() -> None:
    heard: list[Any] = []

    def act(rank: int, desk: GatherResponder) -> list[Any]:
        results = []
        if rank == 0:
            desk.start(lambda: len(heard), heard.append)
        else:
            results = [desk.request("now")[0] for _ in range(3)]
        desk.close()
        return results

    (_, results), _ = on_ranks(2, act)
    assert results == [0, 1, 2]
    assert heard == [[i, "now"] for i in range(3)]


def test_ranks_that_all_serve_do_not_gather_in_circles() -> None:
    def act(rank: int, desk: GatherResponder) -> None:
        desk.start(lambda: None)
        desk.close()

    _, rounds = on_ranks(3, act)
    assert rounds == 2  # what the answers met, and the end


def test_what_an_answer_fails_with_surfaces_at_close() -> None:
    desk = GatherResponder(ThreadLine(Room(1), 0))
    desk.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        desk.close()


def test_a_rank_that_serves_cannot_call() -> None:
    def act(rank: int, desk: GatherResponder) -> str:
        desk.start(lambda: None)
        with pytest.raises(JoinError) as caught:
            desk.request(None)
        desk.close()
        return str(caught.value)

    (text,), _ = on_ranks(1, act)
    assert "answers calls by itself" in text


def test_a_call_after_another_rank_has_ended_says_so() -> None:
    def act(rank: int, desk: GatherResponder) -> str:
        text = ""
        if rank == 1:
            with pytest.raises(JoinError) as caught:
                desk.request(None)
            text = str(caught.value)
        desk.close()
        return text

    results, _ = on_ranks(3, act)
    assert results[1].startswith("rank 0, 2 ended the join while this rank still calls")


def over_gloo(rank: int, world_size: int) -> list[Any]:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    desk = GatherResponder(control_channel(dist.group.WORLD, "desk"))
    results = [desk.request(f"{rank}.{i}") for i in range(rank)]
    desk.start(lambda: f"{rank} left")
    desk.close()
    return results


def test_calls_go_over_process_groups() -> None:
    assert run_ranks(over_gloo, 3, timeout_s=30) == [
        [],
        [["0 left", "1.0", "2.0"]],
        [["0 left", "1.0", "2.0"], ["0 left", "1 left", "2.1"]],
    ]
