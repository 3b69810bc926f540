"""Where the time of a run went, over its attempts: each second is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagereg.sweep.goodput import failures, goodput, starts
from stagereg.sweep.run import RankRecord, Run, Span, Started

KILLED = "its process was killed"


def run_of(*attempts: RankRecord) -> Run:
    earlier = tuple(Run(Path("run"), (attempt,)) for attempt in attempts[:-1])
    return Run(Path("run"), attempts[-1:], earlier)


def test_training_saves_and_starts_are_told_apart() -> None:
    begun = Started(1, 90.0, {"started": 4.0, "imported": 5.0, "first step": 2.0})
    steps = ((1, 101.0), (2, 102.0), (3, 105.0), (4, 106.0))
    stalls = (Span(2, 102.0, 1.5), Span(4, 106.0, 0.5))
    life = goodput(run_of(RankRecord(0, steps=steps, stalls=stalls, started=begun, first=99.0, last=110.0)))
    assert life is not None
    assert (life.seconds, life.training, life.saves, life.again) == (20.0, 3.5, 2.0, 0.0)
    assert (life.starts, life.restarts, life.rest, life.share) == (11.0, {}, 3.5, 0.175)


def test_steps_that_were_taken_before_are_no_training_and_restarts_count_by_phase() -> None:
    first = RankRecord(0, steps=((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)), first=0.0, last=4.0)
    phases = {"noticed": 1.0, "started": 2.0, "first step": 3.0}
    again = Started(3, 4.0, phases, number=1, why=KILLED, again=2)
    second = RankRecord(0, steps=((3, 10.0), (4, 11.0), (5, 13.0)), started=again, first=9.0, last=13.0)
    third = RankRecord(0, first=14.0, last=15.0)  # which came to no step
    phases = {"noticed": 0.5, "started": 1.5, "first step": 2.0}
    last = Started(6, 14.0, phases, number=3, why=KILLED)
    fourth = RankRecord(0, steps=((6, 18.0), (7, 19.0)), started=last, first=17.0, last=19.0)
    run = run_of(first, second, third, fourth)
    life = goodput(run)
    assert life is not None
    assert (life.seconds, life.training, life.again) == (19.0, 3.0 + 2.0 + 1.0, 1.0)
    assert life.restarts == {"noticed": 1.5, "started": 3.5, "first step": 5.0}
    assert life.rest == 1.0 + 1.0  # until the first step, whose phases are unknown; and the attempt without one
    assert [start.number for start in failures(run)] == [1, 3]
    assert starts(run) == failures(run)


def test_a_rollback_in_the_middle_of_an_attempt_does_steps_again() -> None:
    steps = ((1, 1.0), (2, 2.0), (3, 3.0), (2, 7.0), (3, 8.0), (4, 9.0))
    life = goodput(run_of(RankRecord(0, steps=steps, first=0.0, last=9.0)))
    assert life is not None
    assert (life.training, life.again) == (3.0, 5.0)


def test_a_run_without_a_step_has_no_goodput() -> None:
    assert goodput(run_of(RankRecord(0, last=5.0))) is None
    assert goodput(Run(Path("run"), (RankRecord(1, steps=((1, 1.0),)),))) is None


TIMES = st.lists(st.tuples(st.integers(1, 9), st.floats(0.001, 5), st.floats(0, 1)), min_size=1, max_size=8)


@given(attempts=st.lists(st.tuples(TIMES, st.lists(st.floats(0, 9), min_size=9, max_size=9)), min_size=1, max_size=4))
def test_each_second_is_counted_once(
    attempts: list[tuple[list[tuple[int, float, float]], list[float]]],
) -> None:
    now, records = 1000.0, []
    for steps, lasting in attempts:
        phases = {f"phase {number}": seconds for number, seconds in enumerate(lasting)}
        started = Started(steps[0][0], now, phases, why=KILLED if records else "")
        now += sum(lasting)
        first, taken, stalls = now, [], []
        for at, (step, seconds, held) in enumerate(steps):
            now += seconds if at else 0.0
            taken.append((step, now))
            stalls.append(Span(step, now, held * (steps[at + 1][1] if at + 1 < len(steps) else 0.0)))
        records.append(RankRecord(0, steps=tuple(taken), stalls=tuple(stalls), started=started, first=first, last=now))
    life = goodput(run_of(*records))
    assert life is not None
    assert life.seconds == pytest.approx(now - 1000.0, abs=1e-6)
    assert life.rest == pytest.approx(0.0, abs=1e-6)
    parts = (life.training, life.saves, life.again, life.starts, sum(life.restarts.values()))
    assert sum(parts) == pytest.approx(life.seconds, abs=1e-6)
    assert min(parts) >= -1e-9
