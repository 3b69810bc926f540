"""The rank-sum test is exact: it agrees with counting every way to deal the ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.sweep import rank_sum
from stagereg.sweep.cell import Cell, ties
from stagereg.sweep.rank_sum import least_p_value, p_value

FEW = st.lists(st.integers(1, 7).map(float), min_size=1, max_size=5)


@settings(deadline=None)
@given(one=FEW, other=FEW)
def test_it_counts_every_way_to_deal_the_ranks(one: list[float], other: list[float]) -> None:
    together = [*one, *other]
    ranks = [sum((each < value) + (each <= value) + 1 for each in together) for value in together]  # doubled
    expected = len(one) * sum(ranks) / len(ranks)
    off = abs(sum(ranks[: len(one)]) - expected)
    dealt = list(itertools.combinations(ranks, len(one)))
    assert p_value(one, other) == pytest.approx(sum(abs(sum(hand) - expected) >= off for hand in dealt) / len(dealt))
    assert p_value(one, other) == pytest.approx(p_value(other, one))


@pytest.mark.parametrize(("runs", "ways"), [(3, 10), (4, 35), (5, 126), (10, 92378)])
def test_complete_separation_is_as_rare_as_the_books_have_it(runs: int, ways: int) -> None:
    assert p_value(range(runs), range(runs, 2 * runs)) == pytest.approx(1 / ways)
    assert least_p_value(runs, runs) == pytest.approx(1 / ways)


def test_the_approximation_for_many_runs_meets_the_exact_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    for count, values in itertools.product((20, 40), (1, 2, 4, 1000)):
        for shift in (0, 0.3, 0.6):
            one, other = ([draw.gauss(by, 1) * values // 3 for _ in range(count)] for by in (0, shift))
            monkeypatch.setattr(rank_sum, "_EXACT", 0)
            near = p_value(one, other)
            monkeypatch.setattr(rank_sum, "_EXACT", 100)
            exact = p_value(one, other)
            assert near == pytest.approx(exact, rel=0.1, abs=0.003) or min(near, exact) > 0.1
    assert p_value([1.0] * 60, [1.0] * 60) == 1.0


@pytest.mark.parametrize("number", [2, 3, 9])
@pytest.mark.parametrize("runs", [2, 4, 5, 10])
def test_equal_combinations_are_told_apart_in_at_most_one_sweep_of_twenty(number: int, runs: int) -> None:
    draw = random.Random(runs)
    sweeps, claimed = 400, 0
    for _ in range(sweeps):
        cells = sorted(
            (Cell.of([draw.gauss(10, 1) for _ in range(runs)]) for _ in range(number)), key=lambda c: c.median
        )
        claimed += not any(ties(cells[0], cells[1:]))
    assert claimed / sweeps <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / sweeps)
