"""Cases are measured in turns.

A B C ... A B C in one run, shown by median, spread and a ratio to the same run's ceiling.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagereg.bench.measure as measure
from stagereg.bench.measure import Case, NotThere, Series, Stopwatch, interleave, spread
from stagereg.bench.report import of_series

SECONDS = st.floats(min_value=1e-6, max_value=1e3)


class Clock:
    """A clock that moves only when a case works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(Case):
    """Takes the given seconds, one after the other, and writes down when it was called."""

    def __init__(self, row: str, clock: Clock, log: list[str], *seconds: float) -> None:
        super().__init__(row)
        self.clock, self.log, self.seconds = clock, log, iter(seconds)
        self.closed = 0

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        self.log.append(self.rows[0])
        watch.start()
        self.clock.now += next(self.seconds)
        return {self.rows[0]: watch.lap()}

    def close(self) -> None:
        self.closed += 1


def test_every_round_runs_every_case_once_in_the_same_order() -> None:
    clock, log = Clock(), []
    cases = [Worker(row, clock, log, *[1.0] * 4) for row in "ABC"]
    interleave(cases, 3, Stopwatch(clock=clock))
    assert log == list("ABC") * 4


def test_the_first_round_only_warms_up() -> None:
    clock = Clock()
    (series,) = interleave([Worker("A", clock, [], 99.0, 1.0, 2.0)], 2, Stopwatch(clock=clock))
    assert series.samples == [1.0, 2.0]


def test_changes_between_rounds_are_not_timed() -> None:
    clock, log = Clock(), []

    def change() -> None:
        log.append("change")
        clock.now += 50.0

    (series,) = interleave([Worker("A", clock, log, 1.0, 1.0)], 1, Stopwatch(clock=clock), change)
    assert log == ["change", "A", "change", "A", "change"]
    assert series.samples == [1.0]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_a_ratio_is_median_by_median_to_the_ceiling_of_the_same_rounds(rounds: list[tuple[float, float]]) -> None:
    ceiling = Series("ceiling", [top for top, _ in rounds])
    row = Series("row", [mine for _, mine in rounds])
    group = of_series("name", "title", [ceiling, row], "ceiling")
    expected = statistics.median(row.samples) / statistics.median(ceiling.samples)
    assert [line.ratio for line in group.lines] == [1.0, expected]


@given(st.lists(SECONDS, min_size=1, max_size=30))
def test_a_quarter_of_the_samples_lies_on_each_side_of_the_spread(samples: list[float]) -> None:
    first, third = spread(samples)
    quarter = math.ceil((len(samples) - 1) / 4)
    below = sum(one < first * (1 - 1e-9) for one in samples)
    above = sum(one > third * (1 + 1e-9) for one in samples)
    assert below <= quarter >= above
    assert sum(one <= first * (1 + 1e-9) for one in samples) > (len(samples) - 1) // 4
    assert sum(one >= third * (1 - 1e-9) for one in samples) > (len(samples) - 1) // 4


def test_the_spread_of_known_samples() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0)


@pytest.mark.parametrize("trim", [True, False])
def test_freed_memory_goes_back_before_each_sample_by_default(trim: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(measure, "_malloc_trim", lambda pad: log.append("trim"))
    clock = Clock()
    cases = [Worker(row, clock, log, 1.0, 1.0) for row in "AB"]
    interleave(cases, 1, Stopwatch(clock=clock), trim=trim)
    assert log == (["trim", "A", "trim", "B"] if trim else ["A", "B"]) * 2


class Broken(Worker):
    """Fails in its third round."""

    error: Exception = OSError("no space")

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        if self.log.count(self.rows[0]) == 2:
            raise self.error
        return super().sample(watch)


def test_a_case_that_fails_is_left_out_and_the_others_go_on() -> None:
    clock, log = Clock(), []
    cases = [Broken("A", clock, log, 1.0, 1.0), Worker("B", clock, log, *[1.0] * 5)]
    broken, good = interleave(cases, 4, Stopwatch(clock=clock))
    assert broken == Series("A", [], failure="OSError: no space")
    assert good.samples == [1.0] * 4
    assert log == list("ABABBBB")[:7]


def test_a_case_that_cannot_be_measured_here_is_missing_and_no_failure() -> None:
    case = Broken("A", Clock(), ["A", "A"])
    case.error = NotThere("no such stager")
    (series,) = interleave([case], 1, Stopwatch())
    assert (series.missing, series.failure, series.samples) == ("no such stager", "", [])


def test_a_case_that_fails_its_proof_has_no_figures() -> None:
    class Wrong(Worker):
        def prove(self) -> None:
            raise ValueError("not equal")

    clock = Clock()
    (series,) = interleave([Wrong("A", clock, [], 1.0, 1.0)], 1, Stopwatch(clock=clock))
    assert series == Series("A", [], failure="ValueError: not equal")


def test_all_cases_are_closed_however_it_ends() -> None:
    clock = Clock()
    stopped = Broken("A", clock, ["A", "A"])
    stopped.error = KeyboardInterrupt()  # type: ignore[assignment]
    other = Worker("B", clock, [])
    with pytest.raises(KeyboardInterrupt):
        interleave([stopped, other], 1, Stopwatch(clock=clock))
    assert (stopped.closed, other.closed) == (1, 1)


def test_the_device_is_done_before_the_clock_is_looked_at() -> None:
    clock = Clock()
    work = [2.0, 5.0]

    def settle() -> None:
        clock.now += work.pop(0) if work else 0.0

    watch = Stopwatch(settle, clock)
    watch.start()  # what was under way before, 2 s, does not count
    assert watch.lap(settled=False) == 0.0
    assert watch.lap() == 5.0
