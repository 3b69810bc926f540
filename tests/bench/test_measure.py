"""Cases are measured in turns.

A B C ... A B C in one run, shown by median, spread and a ratio to the same run's ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stagereg.bench.measure import Case, Series, interleave, peaks, spread
from stagereg.bench.report import of_series


class Clock:
    """A clock that moves only when a case works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(Case):
    """Takes the given seconds, one after the other, and writes down when it was called."""

    error: BaseException | None = None
    closed = 0

    def __init__(self, row: str, clock: Clock, log: list[str], *seconds: float) -> None:
        super().__init__(row)
        self.clock, self.log, self.seconds = clock, log, iter(seconds)

    def turn(self) -> Iterator[None]:
        self.log.append(self.rows[0])
        self.clock.now += 0.25  # is not timed
        yield
        if self.error is not None and self.log.count(self.rows[0]) > 2:
            raise self.error
        self.clock.now += next(self.seconds)
        yield
        self.clock.now += 0.25

    def close(self) -> None:
        self.closed += 1


def test_cases_take_turns_and_later_rounds_count() -> None:
    clock, log = Clock(), []

    def change() -> None:
        log.append("change")
        clock.now += 50.0

    cases = [Worker("A", clock, log, 99.0, 1.0, 2.0), Worker("B", clock, log, 99.0, 3.0, 4.0)]
    first, second = interleave(cases, 2, before_round=change, clock=clock)
    turns = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert [sorted(turn) for turn in turns] == [["A", "B", "change"]] * 3 + [["change"]]  # the last is before the proof
    assert {turn[0] for turn in turns} == {"change"}
    assert (first.samples, second.samples) == ([1.0, 2.0], [3.0, 4.0])


def test_a_ratio_is_of_medians_and_a_spread_the_middle_half() -> None:
    ceiling, row = Series("ceiling", [1.0, 4.0, 2.0]), Series("row", [3.0, 1.0, 100.0])
    lines = of_series("name", "title", [ceiling, row], "ceiling", {row.row: 2.0}).lines
    assert [line.figures["ratio"] for line in lines] == [1.0, 1.5]
    assert [line.figures.get("peak") for line in lines] == [None, 2.0]
    assert [line.cells[-1].strip() for line in lines] == ["-", "2.00"]
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0)


def test_a_case_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Wrong(Worker):
        def prove(self) -> None:
            raise ValueError("not equal")

    clock, log = Clock(), []
    cases = [Worker("A", clock, log, 1.0, 1.0), Worker("B", clock, log, *[1.0] * 5), Wrong("C", clock, log, *[1.0] * 5)]
    cases[0].error = OSError("no space")
    broken, good, wrong = interleave(cases, 4, clock=clock)
    assert broken == Series("A", [], failure="OSError: no space")
    assert good.samples == [1.0] * 4
    assert wrong == Series("C", [], failure="ValueError: not equal"), "one that fails its proof has no figures"
    assert "".join(sorted(log)) == "AAABBBBBCCCCC"
    assert [case.closed for case in cases] == [1, 1, 1]
    interrupted = [Worker("A", Clock(), ["A", "A"]), Worker("B", Clock(), [])]
    interrupted[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        interleave(interrupted, 1)
    assert [case.closed for case in interrupted] == [1, 1], "all are closed however it ends"


def test_only_the_last_time_of_a_case_waits_for_the_device() -> None:
    clock = Clock()

    def settle() -> None:
        clock.now += 1.0

    def turn() -> Iterator[None]:
        yield
        clock.now += 2.0
        yield
        yield

    settle()  # what was under way before does not count
    sample = Case("blocked", "done", turn=turn).sample(settle, clock)
    assert sample == {"blocked": 2.0, "done": 3.0}


def test_the_peak_is_that_of_two_turns_from_scratch() -> None:
    mib, closed = 2**20, []

    class Keeping(Case):
        kept: torch.Tensor | None = None

        def turn(self) -> Iterator[None]:
            yield
            if self.kept is None:
                self.kept = torch.ones(32 * mib, dtype=torch.uint8)
            else:
                torch.ones(16 * mib, dtype=torch.uint8)
            yield

        def close(self) -> None:
            closed.append(self.kept is None)
            self.kept = None

    def failing() -> Iterator[None]:
        yield
        raise OSError

    found = peaks([Keeping("kept", "also"), Case("fails", turn=failing), Keeping("again")])
    assert closed == [False, False]
    assert found.keys() == {"kept", "also", "again"}
    for nbytes in found.values():
        assert 46 * mib < nbytes < 52 * mib
