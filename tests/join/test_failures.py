"""When one rank fails in any way, every other rank ends within the join's timeout, with the rank and the reason."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.testing.ranks as ranks
from stagereg.testing import RankFailure, run_ranks
from stagereg.testing.worker import new_group

from .reference import EXACT, batch, difference, mlp

TIMEOUT_S = 3.0
SLACK_S = 10.0
"""Seconds that a rank may take beyond the timeout to raise, on a machine with more ranks than cores."""
WAYS = ["torch's wire", "counted", "planned", "iterate"]


def slow_but(*quick: str) -> list[object]:
    return [way if way in quick else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the harness wait for ranks that outlive another as long as they may take to raise."""
    monkeypatch.setattr(ranks, "_LINGER_S", TIMEOUT_S + SLACK_S)


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(mlp().double())


def join(joinables: list[Any], way: str, data: list[Any], timeout_s: float = TIMEOUT_S) -> stagereg.Join:
    mode = way if way in ("counted", "planned") else None
    return stagereg.Join(joinables, mode=mode, loader=data if way == "planned" else None, timeout=timeout_s)


def trains(rank: int, way: str, length: int, trouble: Callable[[int], None], timeout_s: float = TIMEOUT_S) -> None:
    """A loop over uneven inputs, with trouble between forward and backward."""
    ddp = model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = [batch(rank, 0, step) for step in range(length)]
    joined = join([ddp, optimizer], way, data, timeout_s)
    with joined:
        for step, x in enumerate(joined.iterate(data) if way == "iterate" else data):
            optimizer.zero_grad()
            loss = ddp(x).sum()
            trouble(step)
            loss.backward()
            optimizer.step()


def outcome(act: Callable[[], object]) -> tuple[str, str, float]:
    """What a rank ends with: the type of its error, its text, and after how many seconds."""
    started = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


LENGTHS = (2, 6, 6)


def raising(rank: int, world_size: int, way: str) -> tuple[str, str, float]:
    def trouble(step: int) -> None:
        if rank == 1 and step == 3:
            raise ValueError("loss is not finite")

    return outcome(lambda: trains(rank, way, LENGTHS[rank], trouble, timeout_s=60))


# iterate plans where all lengths are known.
@pytest.mark.parametrize("way", slow_but("torch's wire", "counted", "iterate"))
def test_an_exception_on_one_rank_is_reported_on_all(way: str) -> None:
    joined, failed, active = run_ranks(raising, 3, args=(way,), timeout_s=60)
    assert failed[:2] == ("ValueError", "loss is not finite")
    for kind, text, seconds in (joined, active):
        assert kind == "PeerFailedError"
        assert "rank 1" in text
        assert "rank 1 failed: ValueError: loss is not finite\nThe cause is there: read the output of rank 1" in text
        assert seconds < SLACK_S


def failing_before_its_answer(rank: int, world_size: int) -> tuple[str, str, float]:
    """A rank fails in the step in which another waits for its answer about the loop's gradients."""

    def trouble(step: int) -> None:
        if rank == 1 and step == 1:
            raise ValueError("loss is not finite")

    return outcome(lambda: trains(rank, "counted", (1, 3)[rank], trouble, timeout_s=60))


def test_an_exception_reaches_a_rank_that_waits_outside_any_collective() -> None:
    (kind, text, seconds), _ = run_ranks(failing_before_its_answer, 2, timeout_s=90)
    assert kind == "PeerFailedError"
    assert "rank 1 failed: ValueError: loss is not finite" in text
    assert seconds < SLACK_S


def never_looping(rank: int, world_size: int) -> tuple[str, str, float]:
    """One rank fails before the loop that the others begin."""
    ddp = model()

    def act() -> None:
        join = stagereg.Join([ddp], timeout=TIMEOUT_S)
        with join:
            if rank == 1:
                raise ValueError("no such data set")
            for x in join.iterate([batch(rank, 0, 0)]):
                ddp(x).sum().backward()

    return outcome(act)


def test_a_rank_that_fails_before_its_first_loop_is_named() -> None:
    one, _, other = run_ranks(never_looping, 3, timeout_s=60)
    for kind, text, seconds in (one, other):
        assert kind == "PeerFailedError"
        assert "rank 1 failed: ValueError: no such data set" in text
        assert seconds < TIMEOUT_S + SLACK_S


def going_on(rank: int, world_size: int) -> list[float]:
    """All ranks leave three joins of each kind by the same exception, and use the process group afterwards."""
    sums = []
    for way in WAYS * 3:
        with contextlib.suppress(KeyError):
            trains(rank, way, 3, lambda step: {0: None}[step])
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
    return sums


def test_ranks_that_all_leave_by_the_same_exception_can_go_on() -> None:
    assert run_ranks(going_on, 3, timeout_s=60) == [[3.0] * 3 * len(WAYS)] * 3


def dying(rank: int, world_size: int, way: str, number: int, folder: str) -> None:
    def trouble(step: int) -> None:
        if rank == 1 and step == 3:
            os.kill(os.getpid(), number)

    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    trains(rank, way, LENGTHS[rank], lambda step: None)  # so the next join needs no time to be entered
    seen = outcome(lambda: trains(rank, way, LENGTHS[rank], trouble))
    Path(folder, f"{rank}.part").write_text("\n".join(map(str, [seen[0], seen[2], seen[1]])))
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    if len(list(Path(folder).glob("[0-9]"))) == 2:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGKILL)
    raise RuntimeError("this rank is done; the harness would wait for the one that is gone")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("way", slow_but("iterate"))
def test_a_rank_that_is_killed_or_frozen_is_named_by_all_others(way: str, number: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(dying, 3, args=(way, number, str(tmp_path)), timeout_s=60)
    for rank in (0, 2):
        kind, seconds, *text = (tmp_path / str(rank)).read_text().splitlines()
        assert kind == "PeerFailedError", text
        assert "rank 1" in text[0]
        assert float(seconds) < TIMEOUT_S + SLACK_S


def stuck(rank: int, world_size: int, way: str) -> tuple[str, str, float]:
    """Rank 1 takes no part until the others have raised."""
    store = dist.distributed_c10d._get_default_store()

    def trouble(step: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S + SLACK_S
        while (
            rank == 1 and step == 3 and time.monotonic() < deadline and not store.check(["raised on 0", "raised on 2"])
        ):
            threading.Event().wait(0.05)  # a wait in the store would keep this rank's own thread from it

    seen = outcome(lambda: trains(rank, way, LENGTHS[rank], trouble))
    store.set(f"raised on {rank}", "")
    return seen


@pytest.mark.parametrize("way", slow_but("iterate"))
def test_a_rank_that_is_alive_but_takes_no_part_is_named_after_the_timeout(way: str) -> None:
    joined, _, active = run_ranks(stuck, 3, args=(way,), timeout_s=60)
    for kind, text, seconds in (joined, active):
        assert kind == "PeerFailedError"
        assert "rank 1" in text
        assert "join.timeout" in text
        assert TIMEOUT_S * 0.5 < seconds < TIMEOUT_S + SLACK_S


class NeverNotifies(stagereg.Joinable):
    """Reduces something each step, and does not announce it."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self) -> None:
        dist.all_reduce(torch.ones(8))

    def join_hook(self, **kwargs: Any) -> stagereg.JoinHook:
        return stagereg.JoinHook()

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def never_notifying(rank: int, world_size: int, way: str) -> tuple[str, str, float]:
    def act() -> None:
        joinable = NeverNotifies()
        data = list(range(2 + 2 * rank))
        with join([joinable], way, data):
            for _ in data:
                joinable()

    return outcome(act)


@pytest.mark.parametrize("way", slow_but("torch's wire", "counted")[:3])
def test_a_joinable_that_never_notifies_is_an_error_on_all_ranks(way: str) -> None:
    for kind, text, seconds in run_ranks(never_notifying, 3, args=(way,), timeout_s=60):
        assert kind in ("JoinError", "PeerFailedError")
        assert "never announced" in text
        assert seconds < TIMEOUT_S + SLACK_S


def misused(rank: int, world_size: int, what: list[str]) -> list[tuple[str, str, float]]:
    """Each misuse in a process group of its own."""
    outcomes = []
    for number, each in enumerate(what):
        print(f"now comes {each}")
        if number:
            new_group()
        outcomes.append(misuse(rank, each))
    return outcomes


def misuse(rank: int, what: str) -> tuple[str, str, float]:
    one, two = model(), model()
    x = batch(rank, 0, 0)

    def act() -> None:
        if what == "nested, both used inside":
            with stagereg.Join([one], timeout=TIMEOUT_S), stagereg.Join([two], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    (one(x).sum() + two(x).sum()).backward()
        elif what == "nested, the same module":
            with stagereg.Join([one], timeout=TIMEOUT_S), stagereg.Join([one], timeout=TIMEOUT_S):
                one(x).sum().backward()
        elif what == "another order than listed":
            with stagereg.Join([one, two], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    two(x).sum().backward()
                    one(x).sum().backward()
        elif what == "a forward without a backward":
            with stagereg.Join([one], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    one(x).sum().backward()
                if rank == 1:
                    one(x)
        elif what == "static graph, a rank without batches":
            fixed = DistributedDataParallel(mlp().double(), static_graph=True)
            with stagereg.Join([fixed], timeout=TIMEOUT_S):
                for _ in range(2 * rank):
                    fixed(x).sum().backward()
        elif what == "some ranks reduce and others do not":
            with stagereg.Join([one], mode="counted", timeout=TIMEOUT_S):
                for step in range(4):
                    one.require_backward_grad_sync = rank == 0 or step % 2 == 1
                    one(x).sum().backward()
        elif what == "a loop inside a loop":
            joined = stagereg.Join([one], timeout=TIMEOUT_S)
            with joined:
                for b in joined.iterate([x] * 3):
                    one(b).sum().backward()
                    for again in joined.iterate([x]):
                        one(again)
        elif what == "two loops in turns":
            joined = stagereg.Join([one], timeout=TIMEOUT_S)
            with joined:
                for b, _ in zip(joined.iterate([x] * 3), joined.iterate([x]), strict=False):
                    one(b).sum().backward()
        elif what == "a module left alone":
            whole = nn.Linear(4, 1).double()
            joined = stagereg.Join([stagereg.build("joinable", "module", module=whole)], timeout=TIMEOUT_S)
            with joined:
                for step, b in enumerate(joined.iterate([x] * 4)):
                    loss = whole(b).sum()
                    loss.backward()
                    dist.all_reduce(whole.weight.grad)
                    if rank == 1 and step == 1:
                        break

    return outcome(act)


MESSAGES = {
    "a loop inside a loop": "only one runs at a time",
    "two loops in turns": "only one runs at a time",
    "nested, both used inside": "used inside an inner one",
    "nested, the same module": "in another join already",
    "another order than listed": "in the order in which the loop uses them",
    "a forward without a backward": "a forward without a backward",
    "static graph, a rank without batches": "static_graph",
    "some ranks reduce and others do not": "Decide by the number of the step",
    "a module left alone": "left the loop while others go on",
}


@pytest.mark.parametrize("size", [2, 3])
def test_what_cannot_be_joined_is_an_error_on_all_ranks(size: int) -> None:
    what = [each for each in MESSAGES if ("module left" in each) == (size == 3)]
    for outcomes in run_ranks(misused, size, args=(what,), timeout_s=100):
        for each, (kind, text, seconds) in zip(what, outcomes, strict=True):
            assert kind in ("JoinError", "PeerFailedError"), (each, outcomes)
            assert MESSAGES[each] in text
            assert seconds < TIMEOUT_S + SLACK_S, each


def twice(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    return [forwarded_twice(rank, way) for way in WAYS]


def forwarded_twice(rank: int, way: str) -> list[torch.Tensor]:
    """Two forwards for one backward, and forwards that are no training at all."""
    ddp = model()
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    data = [batch(rank, 0, step) for step in range(1 + 2 * rank)]
    joined = join([ddp, optimizer], way, data)
    with joined:
        for x in joined.iterate(data) if way == "iterate" else data:
            with torch.no_grad():
                ddp(x)
            optimizer.zero_grad()
            (ddp(x).sum() + ddp(2 * x).square().sum()).backward()
            optimizer.step()
    return [p.detach() for p in ddp.parameters()]


def test_two_forwards_for_one_backward_and_evaluation_between_give_the_references_numbers() -> None:
    torch.manual_seed(0)
    single = mlp().double()
    optimizer = torch.optim.Adam(single.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(3):
            if step < 1 + 2 * rank:
                x = batch(rank, 0, step)
                ((single(x).sum() + single(2 * x).square().sum()) / 3).backward()
        optimizer.step()
    for outcomes in run_ranks(twice, 3, timeout_s=60):
        for way, params in zip(WAYS, outcomes, strict=True):
            assert difference(params, [p.detach() for p in single.parameters()]) < EXACT, way
