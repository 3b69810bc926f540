"""Targets are marked by the printed figure, and each names existing rows and groups."""

from __future__ import annotations

import pytest

import stagereg.bench.join_rows as join
import stagereg.bench.staging as staging
import stagereg.bench.stall as stall
import stagereg.bench.write as write
from stagereg.bench.join_rank import MODELS
from stagereg.bench.report import Group, Line, figures
from stagereg.bench.states import STATES
from stagereg.bench.targets import NOISE, TARGETS, Target, judge

RATIO = Target("staging", "copy", "large", "mine", "torch", "5", reach=1.3, aim=1.05)
LOST = Target("stall", "lost", "1", "mine", "torch", "113", reach=20, aim=NOISE, unit="ms lost")


WITHIN = Target("join", "step", "medium/2", "mine", "torch", "1.01", reach=NOISE, aim=NOISE)


@pytest.mark.parametrize(
    ("target", "measured", "noise", "mark"),
    [
        (RATIO, 1.05, 0.0, "aim reached"),
        (RATIO, 1.0549, 0.0, "aim reached"),  # printed as 1.05
        (RATIO, 1.06, 0.0, "reached, aim missed"),
        (RATIO, 1.3, 0.0, "reached, aim missed"),
        (RATIO, 1.31, 0.0, "missed"),
        (LOST, 4.0, 5.0, "aim reached"),
        (LOST, -3.0, 0.0, "aim reached"),
        (LOST, 6.0, 5.0, "reached, aim missed"),
        (LOST, 21.0, 5.0, "missed"),
        (LOST, 21.0, 100.0, "missed"),  # a run that is all noise shows nothing
        (WITHIN, 1.03, 1.034, "aim reached"),
        (WITHIN, 1.04, 1.034, "missed"),
    ],
)
def test_a_figure_is_marked_by_the_target_that_it_reaches(
    target: Target, measured: float, noise: float, mark: str
) -> None:
    found = {(target.group, "mine", target.unit): measured, (target.group, "torch", target.unit): 5.5}
    verdict = judge(target, found, noise)
    assert (verdict.mark, verdict.measured, verdict.torchs) == (mark, measured, 5.5)


def test_a_row_of_another_group_or_unit_is_no_measurement() -> None:
    assert judge(RATIO, {("gpt", "mine", "x"): 1.0, ("large", "mine", "ms lost"): 1.0}).mark == "not measured"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.kind}-{t.group}-{t.row}-{t.unit}")
def test_each_target_names_an_existing_row_and_group(target: Target) -> None:
    rows = {"staging": staging.row_names("cpu"), "write": write.row_names(), "stall": stall.row_names()}
    rows["join"] = join.row_names()
    groups = {"stall": ["1", "2"], "join": [join.group_name(model, ranks) for model in MODELS for ranks in (2, 4)]}
    assert {target.row, target.torchs} <= set(rows[target.kind])
    assert target.group in groups.get(target.kind, STATES)
    assert NOISE in (target.aim, target.reach) or target.aim <= target.reach


def test_the_figures_of_targets_are_ratios_and_milliseconds() -> None:
    lines = [
        Line("copy", {"seconds": [1.0]}, ratio=2.0),
        Line("loop", {"lost": [0.01, 0.03], "blocked": [0.002]}, step_seconds=1.0),
        Line("join", {"x": [1.5]}, ratio=1.5, figures={"collectives": 1.0}),
    ]
    found = figures([Group("g", "", lines)])
    assert found == pytest.approx(
        {
            ("g", "copy", "x"): 2.0,
            ("g", "loop", "ms lost"): 20.0,
            ("g", "loop", "ms blocked"): 2.0,
            ("g", "join", "x"): 1.5,
            ("g", "join", "collectives"): 1.0,
        }
    )
