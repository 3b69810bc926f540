"""Figures are computed from the lines of a run, as far as these go, and fit the description of their metric."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.sweep.figures import figures, saved
from stagereg.sweep.metric import METRICS
from stagereg.sweep.run import RankRecord, Run, Span

from ..support.samples import MIB, Sample, write_run

GIB = 2**30


def run_of(*ranks: RankRecord) -> Run:
    return Run(Path("run"), ranks)


def steps(*durations: float, start: float = 0.0) -> tuple[tuple[int, float], ...]:
    """Steps from 1 on, the first of which ends at ``start``."""
    seen = [(1, start)]
    for duration in durations:
        seen.append((seen[-1][0] + 1, seen[-1][1] + duration))
    return tuple(seen)


def test_a_whole_run_has_all_figures(tmp_path: Path) -> None:
    found = figures(Run.read(write_run(tmp_path)))
    # By the second rank, which stalls longest: 39 steps of 10 ms, 9 of them overlapped and 1 ms longer, 4 stalls.
    train_s, lost_s = 0.39 + 9e-3 + 4 * 2.1e-3, 9e-3 + 4 * 2.1e-3
    times = {"train_s": train_s, "lost_s": lost_s, "lost_percent": 100 * lost_s / train_s, "step_s": 0.010}
    saves = {"checkpoints": 4, "stall_ms": 2.1, "write_s": 0.020, "state_bytes": 128 * MIB}
    rates = {"samples_per_s": 2 * 39 * 8 / train_s, "staged_gib_per_s": 0.125 / 0.005, "write_gib_per_s": 0.125 / 0.020}
    others = {"peak_host_gib": 1.0, "loss": 2.5, "shadowed_steps": 3, "steps": 40}
    assert found == pytest.approx(times | saves | rates | others, rel=1e-3)
    assert {one.name for one in METRICS} <= found.keys()


def test_a_killed_run_has_the_figures_up_to_its_end(tmp_path: Path) -> None:
    found = figures(Run.read(write_run(tmp_path, Sample(killed=True, steps=41))))
    assert found["checkpoints"] == 3  # the fourth was being written
    assert found["stall_ms"] == pytest.approx(2.1)
    assert not found.keys() & {"peak_host_gib", "shadowed_steps"}


def test_a_save_is_as_slow_as_its_slowest_rank_as_large_as_all() -> None:
    one = RankRecord(0, stalls=(Span(1, 0, 1.0), Span(2, 5, 3.0)), stages=(Span(1, 0, 2.0, GIB), Span(2, 5, 1.0, GIB)))
    two = RankRecord(1, stalls=(Span(1, 0, 2.0), Span(2, 5, 1.0)), stages=(Span(1, 0, 1.0, GIB), Span(2, 5, 4.0, GIB)))
    found = figures(run_of(one, two))
    assert found["stall_ms"] == 2500
    assert found["staged_gib_per_s"] == (2 / 2 + 2 / 4) / 2
    assert found["state_bytes"] == 2 * GIB


def test_a_step_saved_twice_is_two_checkpoints_a_lost_one_none() -> None:
    twice, lost = (Span(4, 0, 1.0), Span(4, 5, 3.0)), ((9, "disk full"),)
    run = run_of(RankRecord(0, stalls=twice, writes=twice, lost=lost), RankRecord(1, stalls=twice, lost=lost))
    found = figures(run)
    assert (found["stall_ms"], found["checkpoints"], found["lost_checkpoints"]) == (2000, 2, 1)
    seen = sorted((one.step, one.stall_s or 0, one.state, one.error) for one in saved(run))
    assert seen == [(4, 1.0, "complete", ""), (4, 3.0, "complete", ""), (9, 0, "lost", "disk full")]


def test_memory_is_known_where_all_ranks_recorded_it() -> None:
    ended = {"status": "completed", "peak_rss": GIB}
    first, second = RankRecord(0, {"world_size": 2}, end=ended), RankRecord(1, {"world_size": 2}, end=ended)
    assert figures(run_of(first, second)) == {"peak_host_gib": 2.0}
    assert figures(run_of(first, replace(second, end={"status": "failed"}))) == {}
    assert figures(run_of(first)) == {}


class TestRestarts:
    def test_figures_are_of_all_attempts(self) -> None:
        save, more = Span(2, 1.0, 1.0), Span(4, 102.0, 3.0)
        first = RankRecord(
            0,
            steps=steps(2, 1, 1),
            stalls=(save,),
            writes=(save,),
            lost=((9, "full"),),
            end={"status": "failed", "peak_rss": GIB},
        )
        second = RankRecord(0, steps=((3, 100.0), (4, 102.0), (5, 106.0)), stalls=(more,), writes=(more,))
        run = Run(Path("run"), (second,), (run_of(first),))
        found = figures(run)
        assert (found["steps"], found["checkpoints"], found["lost_checkpoints"]) == (5, 2, 1)
        assert (found["stall_ms"], found["train_s"], found["lost_s"]) == (2000, 4 + 6, 1 + 3)
        assert found["lost_percent"] == 40
        assert found["peak_host_gib"] == 1, "no memory is known of the attempt that was killed"
        assert [(one.step, one.restart, one.start) for one in saved(run)] == [(9, 0, 0.0), (2, 0, 1.0), (4, 1, 102.0)]

    def test_samples_are_of_the_attempts_that_counted_them(self) -> None:
        logs = tuple((step, float(step), {"samples": 10.0}) for step in (1, 2, 3))
        first, second = (RankRecord(0, steps=steps(1, seconds), logs=logs) for seconds in (1, 2))
        assert figures(Run(Path("run"), (second,), (run_of(first),)))["samples_per_s"] == (20 + 20) / (2 + 3)
        joined = replace(second, logs=(), join={"steps": 3, "shadowed": 1, "samples": 12})
        torn = replace(first, logs=(), join={"steps": 3, "shadowed": 2, "samples": 3})
        found = figures(Run(Path("run"), (joined,), (run_of(torn),)))
        assert (found["samples_per_s"], found["shadowed_steps"]) == (8 / 3, 3)


class TestLostTime:
    def test_nothing_is_lost_to_checkpoints_in_a_run_without_any(self) -> None:
        found = figures(run_of(RankRecord(0, steps=steps(1, 1, 1))))
        assert found == {"steps": 4, "train_s": 3, "step_s": 1}

    def test_work_of_other_ranks_disturbs_on_the_same_machine_only(self) -> None:
        here, there = {"host": "a"}, {"host": "b"}
        own = RankRecord(0, here, steps=steps(1, 2, 1, 1), stalls=(Span(9, 99, 0.0),))
        write = (Span(2, 1.5, 1.0),)
        assert figures(run_of(own, RankRecord(1, here, writes=write)))["lost_s"] == 1
        assert figures(run_of(own, RankRecord(1, there, writes=write)))["lost_s"] == 0
        assert figures(run_of(replace(own, start={}), RankRecord(1, {}, writes=write)))["lost_s"] == 0

    def test_logs_that_skip_steps_are_compared_step_by_step(self) -> None:
        seen = ((10, 0.0), (20, 10.0), (25, 15.0), (30, 20.0), (40, 40.0))
        record = RankRecord(0, steps=seen, stalls=(Span(1, -1, 0.5),), writes=(Span(30, 30, 1.0),))
        assert figures(run_of(record))["lost_s"] == 10

    @settings(deadline=None)
    @given(
        durations=st.lists(st.integers(1, 9), min_size=1, max_size=12),
        stalls=st.lists(st.tuples(st.integers(-2, 40), st.integers(0, 4)), min_size=1, max_size=4),
        writes=st.lists(st.tuples(st.integers(-2, 40), st.integers(0, 6)), max_size=4),
    )
    def test_it_equals_a_count_of_every_second(
        self, durations: list[int], stalls: list[tuple[int, int]], writes: list[tuple[int, int]]
    ) -> None:
        record = RankRecord(
            0,
            steps=steps(*durations),
            stalls=tuple(Span(at, start, seconds) for at, (start, seconds) in enumerate(stalls)),
            writes=tuple(Span(at, start, seconds) for at, (start, seconds) in enumerate(writes)),
        )
        held = {second for start, seconds in stalls for second in range(start, start + seconds)}
        busy = {second for start, seconds in writes for second in range(start, start + seconds)} - held
        last = sum(durations)
        lost = len([second for second in held if second >= 0])
        training = len({*range(last), *held} - {second for second in held if second < 0})
        usual, disturbed, began = [], [], 0
        for duration in durations:
            during = set(range(began, began + duration))
            (disturbed if during & busy else usual).append(len(during - held))
            began += duration
        found = figures(run_of(record))
        assert found["train_s"] == pytest.approx(training)
        known = len(usual) >= 3
        assert [name in found for name in ("step_s", "lost_s", "lost_percent")] == [known] * 3
        if known:
            lost += max(0, sum(disturbed) - len(disturbed) * statistics.median(usual))
            assert (found["lost_s"], found["lost_percent"]) == pytest.approx((lost, 100 * lost / training))


def test_samples_that_were_logged_come_before_those_of_the_join() -> None:
    logs = tuple((step, float(step), {"samples": 10.0}) for step in (1, 2, 3))
    join = {"steps": 3, "shadowed": 0, "samples": 12}
    logged = RankRecord(0, steps=steps(1, 1), logs=logs, join=join)
    assert figures(run_of(logged))["samples_per_s"] == 20 / 2
    assert figures(run_of(replace(logged, logs=())))["samples_per_s"] == 8 / 2
    assert "samples_per_s" not in figures(run_of(replace(logged, logs=(), join={"steps": 3, "shadowed": 0})))


LOGS = ((1, 1.0, {"loss": 3.0}), (2, 2.0, {"loss": 2.0}), (3, 3.0, {"gap": 1.0}))
LOSSES: list[tuple[Any, float]] = [
    (1.5, 1.5),
    ({"loss": 1.5, "accuracy": 0.5}, 1.5),
    ({"accuracy": 0.5}, 2.0),
    *((returned, 2.0) for returned in (None, "text", True, [1.0, 2.0])),
    (math.nan, math.nan),
    ({"loss": math.inf}, math.inf),
]


@pytest.mark.parametrize(("returned", "loss"), LOSSES)
def test_the_loss_is_returned_or_the_last_that_rank_0_logged(returned: Any, loss: float) -> None:
    run = run_of(RankRecord(0, logs=LOGS), RankRecord(1, logs=((9, 9.0, {"loss": 9.0}),)))
    assert figures(run, returned)["loss"] == pytest.approx(loss, nan_ok=True)
    assert "loss" not in figures(run_of(RankRecord(1, logs=LOGS)))
    diverged = RankRecord(0, logs=(*LOGS, (4, 4.0, {"loss": None})))
    assert math.isnan(figures(run_of(diverged))["loss"]), "the record has null for NaN"
    assert figures(Run(Path("run"), (RankRecord(0),), (run,)))["loss"] == 2.0, "of an earlier attempt"


def test_returned_numbers_are_figures_also_without_a_run() -> None:
    returned = {"accuracy": 0.5, "count": 3, "nan": math.nan, "name": "x", "flag": True, "list": [1]}
    returned["loss"] = Decimal(1)
    expected = {"returned.accuracy": 0.5, "returned.count": 3.0, "returned.nan": math.nan, "loss": 1.0}
    assert figures(None, returned) == pytest.approx(expected, nan_ok=True)
    assert figures(None) == {}


def test_what_took_no_time_or_has_no_bytes_has_no_rate() -> None:
    found = figures(run_of(RankRecord(0, stages=(Span(1, 0, 0.0, GIB),), writes=(Span(1, 0, 1.0),))))
    assert not found.keys() & {"staged_gib_per_s", "write_gib_per_s"}
    record = RankRecord(0, steps=((1, 5.0), (2, 5.0)), stalls=(Span(1, 4.0, 0.5),), join={"samples": 4})
    assert figures(run_of(record)) == {"stall_ms": 500, "checkpoints": 0, "steps": 2, "shadowed_steps": 0}
    assert figures(run_of(RankRecord(0, steps=((1, 5.0),)))) == {"steps": 1}
