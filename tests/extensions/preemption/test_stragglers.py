"""A rank that the others wait for is named once, with figures; equal ranks never are, whatever load they are under."""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stagereg.base.record as record
import stagereg.extensions.preemption.consensus as preemption_consensus
import stagereg.extensions.preemption.stragglers as stragglers
from stagereg import Checkpointer, Preemption
from stagereg.extensions.preemption.stragglers import BusyClock, Stragglers
from stagereg.testing.ranks import run_ranks


def machine_of(rank: int) -> str:
    return f"m{rank // 4}"


def feed(
    found: Stragglers, busy: Callable[[int], list[float]], exchanges: range, every_s: float = 1.0
) -> list[tuple[int, set[int]]]:
    """Return after which exchanges who was named, where that has changed; a step takes what the slowest computes."""
    changes, before = [], found.named
    for number in exchanges:
        own = busy(number)
        found.add(10 * number, every_s * number, 1.1 * max(own), own)
        if found.named != before:
            before = found.named
            changes.append((number, before))
    return changes


def test_a_slow_rank_is_named_once_with_figures_and_once_when_it_is_so_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(0)

    def busy(number: int) -> list[float]:
        own = [0.07 * random.uniform(0.95, 1.05) for _ in range(8)]
        own[5] += 0.04 if 30 <= number < 130 else 0.0
        return own

    with caplog.at_level(logging.INFO), record.recording(tmp_path, 0, 8):
        changes = feed(Stragglers(machine_of), busy, range(200))
    assert [named for _, named in changes] == [{5}, set()]
    assert 30 + 14 <= changes[0][0] < 30 + 20
    assert 130 + 14 <= changes[1][0] < 130 + 20
    slow, past = [each.getMessage() for each in caplog.records]
    assert slow.startswith("stagereg: rank 5 on machine m1 is slow: the others wait ")
    assert slow.endswith(" step for it, since step 300")
    waited, step = (float(part.split()[-1]) for part in slow.split(" ms")[:2])
    assert 38 < waited < 45
    assert 100 < step < 130
    assert past == f"stagereg: rank 5 on machine m1 is no longer slow, at step {10 * changes[1][0]}"
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [each for each in events if each["event"] == "straggler"]
    assert [(each["step"], each["rank"], each["machine"], each["slow"]) for each in told] == [
        (300, 5, "m1", True),
        (10 * changes[1][0], 5, "m1", False),
    ]


def test_a_slow_machine_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    changes = feed(Stragglers(machine_of), lambda _: [0.05] * 4 + [0.09] * 4, range(40))
    assert changes == [(19, {4, 5, 6, 7})]
    [line] = [each.getMessage() for each in caplog.records]
    assert "ranks 4, 5, 6, 7 on machine m1 are slow: the others wait 40 ms of each 99 ms step for them" in line


def steady(_: int) -> float:
    return 1.0


def loaded(_: int) -> float:
    return random.lognormvariate(0.0, 0.3)


def rarely_held(_: int) -> float:
    return 1.0 + random.paretovariate(1.5) * (random.random() < 0.1)


class Burst:
    """Another program takes half of a processor for a few exchanges, and then of the next one."""

    def __init__(self) -> None:
        self.rank, self.left = 0, 0

    def __call__(self, rank: int) -> float:
        if rank == 0:
            self.left -= 1
            if self.left < 0:
                self.rank, self.left = (self.rank + 1) % 8, random.randrange(1, 10)
        return random.uniform(0.95, 1.05) * (2.0 if rank == self.rank else 1.0)


@pytest.mark.parametrize("noise", [steady, loaded, rarely_held, Burst()])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_equal_ranks_are_not_named_whatever_their_load(
    caplog: pytest.LogCaptureFixture, ranks: int, noise: Callable[[int], float]
) -> None:
    random.seed(ranks)
    assert feed(Stragglers(machine_of), lambda _: [0.1 * noise(rank) for rank in range(ranks)], range(2000)) == []
    assert not caplog.records


@pytest.mark.parametrize("noise", [steady, loaded])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_twice_as_slow_is_named_below_the_same_load(ranks: int, noise: Callable[[int], float]) -> None:
    random.seed(ranks)

    def busy(_: int) -> list[float]:
        return [0.1 * noise(rank) * (2.0 if rank == 1 else 1.0) for rank in range(ranks)]

    assert feed(Stragglers(machine_of), busy, range(400))[0][1] == {1}


def test_what_is_less_than_a_tenth_of_a_step_is_not_said() -> None:
    assert feed(Stragglers(machine_of), lambda _: [0.1, 0.1, 0.11], range(100)) == []
    assert feed(Stragglers(machine_of), lambda _: [0.1, 0.1, 0.12], range(100)) == [(19, {2})]


def test_exchanges_of_short_steps_name_nobody_for_a_moment() -> None:
    def busy(number: int) -> list[float]:
        return [1e-4, 1e-4, 3e-4 if number % 1000 < 400 else 1e-4]

    assert feed(Stragglers(machine_of), busy, range(20_000), every_s=0.0064) == []
    [(number, named)] = feed(Stragglers(machine_of), lambda _: [1e-4, 1e-4, 3e-4], range(2000), every_s=0.0064)
    assert named == {2}
    assert 9.5 <= 0.0064 * number <= 11


def test_ranks_that_are_not_known_are_left_out() -> None:
    assert feed(Stragglers(machine_of), lambda _: [0.0, 0.1, 0.0], range(100)) == []
    assert feed(Stragglers(machine_of), lambda _: [0.0, 0.1, 0.2], range(100)) == [(19, {2})]
    assert feed(Stragglers(machine_of), lambda _: [0.0, 0.0], range(100)) == []


def test_computing_counts_and_an_unknown_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    clock, ends = BusyClock(), time.thread_time() + 0.1
    if not clock._counts:
        pytest.skip("the kernel does not count")
    while time.thread_time() < ends:
        pass
    assert clock.lap() > 0.05
    monkeypatch.setattr(clock, "_file", Path("/nowhere"))
    assert [clock.lap(), clock.lap()] == [0.0, 0.0]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert BusyClock().lap() == 0.0


def train(rank: int, world_size: int, root: str, grace: bool) -> list[str]:
    """Rank 1 computes three times as much, by a simulated clock; return what rank 0 has logged, and exchanges of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda each: said.append(each.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stagereg.extensions.preemption").addHandler(handler)
    calls = itertools.count()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stragglers, "_EVERY_S", 0.0)
        patched.setattr(BusyClock, "lap", lambda _: (next(calls), 3.0 if rank == 1 else 1.0)[1])
        options = {} if grace else {"preemption": Preemption(grace_period=None)}
        with Checkpointer(root, every=10**6, save_last=False, **options) as checkpointer:
            for step in range(1, 25 * preemption_consensus._MOST_CALLS):
                checkpointer.maybe_save(step, {"x": torch.zeros(1)})
    return [*said, str(next(calls))]


def test_a_run_names_its_straggler_by_the_exchanges_that_it_makes_anyway(tmp_path: Path) -> None:
    [line, exchanges], other = run_ranks(train, 2, args=(str(tmp_path), True))
    assert line.startswith("stagereg: rank 1 on machine ")
    assert other == [exchanges]
    assert run_ranks(train, 2, args=(str(tmp_path), False)) == [["0"], ["0"]]
