"""Rows measure what they name: real copies, and segments against the same round's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import stagereg.bench.ceiling as ceiling
import stagereg.bench.staging as staging
import stagereg.bench.stall as stall
import stagereg.bench.states as states
from stagereg.bench.measure import Series, interleave


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() for name, x in state.items()}


def stager(stage: Callable[[dict[str, Any]], Any]) -> Any:
    return SimpleNamespace(stage=stage, should_synchronize_after_execute=False, close=lambda: None)


@pytest.mark.parametrize(("copies", "message"), [(False, "shares the memory"), (True, "differs from the state")])
def test_a_stager_that_does_not_copy_has_no_figures(copies: bool, message: str) -> None:
    state = states.make("large", 0.0001)
    first = cloned(state.tree) if copies else state.tree
    case = staging.Warm(("row",), lambda: stager(lambda state: first), state)
    (series,) = interleave([case], 2, before_round=state.change)
    assert message in series.failure
    assert series.samples == []


def test_a_background_copy_has_two_times() -> None:
    now = [0.0]

    def later(state_dict: dict[str, Any]) -> Any:
        class Coming(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                now[0] += 3.0  # of a made-up clock, after ``stage`` has returned
                return cloned(state_dict)

        now[0] += 1.0
        return Coming()

    state = states.make("large", 0.0001)
    for rows, seconds in ((("row:blocked", "row:done"), [1.0, 4.0]), (("row",), [4.0])):
        case = staging.Warm(rows, lambda: stager(later), state)
        series = interleave([case], 1, clock=lambda: now[0])
        assert [one.samples for one in series] == [[each] for each in seconds]


def test_the_ceiling_of_a_copy_moves_every_byte() -> None:
    copy = ceiling.memmove(4097)
    copy().zero_()
    assert bool((copy() == 1).all())


def test_lost_is_a_segment_less_the_one_without_a_checkpoint() -> None:
    taken = {"mine:alone": [4.0, 8.0, 4.0], "mine:blocked": [0.1, 0.2, 0.3], "mine": [5.0, 10.0, 4.5]}
    series = [*(Series(row, samples) for row, samples in taken.items()), Series("theirs", failure="no process")]
    mine, theirs = stall.group("1", "title", series).lines
    assert mine.samples["lost"] == [1.0, 2.0, 0.5]
    assert mine.figures == {"step": 1.0}  # the median segment without a checkpoint has four steps
    assert [cell.strip() for cell in mine.cells] == ["200.00", "1000.00", "402.70", "750.00 -  1500.00", "1.00"]
    assert (theirs.samples, theirs.failure) == ({}, "no process")
