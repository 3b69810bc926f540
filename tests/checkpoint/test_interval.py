"""The interval's formulas: against the papers' own figures, simulated failures, and a search for the best."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.interval as interval
from stagereg.errors import ConfigError

# In units of the mean time between failures, which the formulas scale with.
COSTS = st.floats(-6, 0.3).map(lambda power: 10.0**power)
MTBFS = st.floats(0, 7).map(lambda power: 10.0**power)


@pytest.mark.parametrize(("mtbf_h", "minutes"), [(24.0, 117), (6.0, 57), (0.25, 9.1)])
def test_daly_gives_the_figures_of_his_paper(mtbf_h: float, minutes: float) -> None:
    # Figures 3 to 5 of the paper: dumps of 5 minutes.
    digits = 1 if minutes < 10 else 0
    assert round(interval.daly(300, mtbf_h * 3600) / 60, digits) == minutes


@settings(deadline=None)
@given(COSTS, MTBFS)
def test_daly_is_near_the_optimum_and_young_for_small_costs(cost: float, mtbf: float) -> None:
    optimum = interval.optimum(cost * mtbf, mtbf)
    assert abs(interval.daly(cost * mtbf, mtbf) / optimum - 1) < (0.01 if cost < 0.7 else 0.07)
    if cost < 1e-4:
        assert interval.young(cost * mtbf, mtbf) == pytest.approx(optimum, rel=0.006)


def least_of(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which ``function`` is least, by golden sections over its logarithm."""
    a, b, part = math.log(low), math.log(high), (math.sqrt(5) - 1) / 2
    for _ in range(50):
        left, right = b - part * (b - a), a + part * (b - a)
        a, b = (a, right) if function(math.exp(left)) < function(math.exp(right)) else (left, b)
    return math.exp((a + b) / 2)


@settings(deadline=None)
@given(COSTS, MTBFS, st.floats(0, 2), st.floats(0, 1))
def test_the_chosen_interval_loses_least(
    cost: float,
    mtbf: float,
    restart: float,
    write: float,  # written within M: otherwise nothing is of any use
) -> None:
    times = (cost * mtbf, mtbf, restart * mtbf, write * mtbf)
    taken = interval.best(times[0], mtbf, times[3])
    # Searched without the factor that all intervals share: after long restarts it leaves no difference.
    found = least_of(lambda at: interval.lost_fraction(at, cost * mtbf, mtbf, 0.0, times[3]), taken / 20, taken * 20)
    assert taken == pytest.approx(found, rel=0.01)
    assert interval.lost_fraction(taken, *times) <= interval.lost_fraction(found, *times) + 1e-12


def simulated(
    at: float, cost: float, mtbf: float, restart: float, write: float, seed: int, lives: int
) -> tuple[float, float]:
    """Live through failures; return the lost fraction, and the standard error of that.

    Knows nothing of the formula: a life is a restart, then work, held by each checkpoint, until the failure; what it
    has brought is the work that its last complete checkpoint holds.
    """
    chance = random.Random(seed)
    gains, spans = [], []
    for _ in range(lives):
        span = chance.expovariate(1 / mtbf)
        now, work, kept, complete = restart, 0.0, 0.0, -math.inf
        while True:
            begins = max(now + at, complete)  # a save waits for the one before
            complete = begins + max(write, cost)
            if complete > span:
                break
            work += at
            kept = work
            now = begins + cost
        gains.append(kept)
        spans.append(span)
    total = sum(spans)
    useful = sum(gains) / total
    # Of a ratio of two sums over independent lives, to first order.
    squares = sum((gain - useful * span) ** 2 for gain, span in zip(gains, spans, strict=True))
    return 1 - useful, math.sqrt(squares) / total


@settings(max_examples=20, deadline=None)
@given(st.floats(0.03, 1.5), st.floats(0.001, 0.3), st.floats(0, 0.3), st.floats(0, 1.0), st.integers(0, 2**32), MTBFS)
def test_the_lost_fraction_is_that_of_simulated_failures(
    at: float, cost: float, restart: float, write: float, seed: int, mtbf: float
) -> None:
    times = [part * mtbf for part in (at, cost, 1.0, restart, write)]
    found, error = simulated(*times, seed, lives=4000)  # type: ignore[misc]
    assert interval.lost_fraction(*times) == pytest.approx(found, abs=5 * error)


@settings(deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-4, 1e3), st.floats(0, 1e6))
def test_steps_are_the_nearest_number_that_leaves_time_to_write(at: float, step: float, least: float) -> None:
    steps = interval.in_steps(at, step, least)
    assert steps >= 1
    assert steps * step >= least * (1 - 1e-9)
    if steps > 1 and (steps - 1) * step >= least:
        assert abs(steps - at / step) <= 0.5 + 1e-9


def test_a_whole_number_of_steps_is_not_rounded_up() -> None:
    assert interval.in_steps(0.3, 0.1, 0.3) == 3


def test_a_time_of_no_use_is_named() -> None:
    good = {"interval_s": 1.0, "cost_s": 1.0, "mtbf_s": 10.0, "restart_s": 1.0, "write_s": 1.0}
    bad = {"interval_s": math.nan, "cost_s": -1.0, "mtbf_s": 0.0, "restart_s": -0.1, "write_s": math.inf}
    for name, value in bad.items():
        with pytest.raises(ConfigError, match=name):
            interval.lost_fraction(**{**good, name: value})


def test_no_torch_is_needed() -> None:
    code = "import sys, stagereg.checkpoint.interval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
