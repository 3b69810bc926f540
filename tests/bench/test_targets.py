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
from stagereg.bench.targets import TARGETS, Noise, Target, judge

RATIO = Target("staging", "copy", "large", "mine", "torch", "5", reach=1.3, aim=1.05)
LOST = Target("stall", "lost", "1", "mine", "torch", "113", reach=20, aim=Noise(), unit="ms lost")


@pytest.mark.parametrize(
    ("measured", "mark"),
    [
        (0.9, "aim reached"),
        (1.05, "aim reached"),
        (1.0549, "aim reached"),  # printed as 1.05
        (1.06, "reached, aim missed"),
        (1.3, "reached, aim missed"),
        (1.31, "missed"),
    ],
)
def test_a_ratio_is_marked_by_the_target_that_it_reaches(measured: float, mark: str) -> None:
    verdict = judge(RATIO, {("large", "mine", "x"): measured, ("large", "torch", "x"): 5.5})
    assert (verdict.mark, verdict.measured, verdict.torchs) == (mark, measured, 5.5)


@pytest.mark.parametrize(
    ("lost", "noise", "mark"),
    [
        (4.0, 5.0, "aim reached"),
        (-3.0, 0.0, "aim reached"),
        (6.0, 5.0, "reached, aim missed"),
        (21.0, 5.0, "missed"),
        (21.0, 100.0, "missed"),  # a run that is all noise shows nothing
    ],
)
def test_nothing_lost_means_no_more_than_the_noise(lost: float, noise: float, mark: str) -> None:
    assert judge(LOST, {("1", "mine", "ms lost"): lost}, noise).mark == mark


@pytest.mark.parametrize(("ratio", "mark"), [(1.0, "aim reached"), (1.03, "aim reached"), (1.04, "missed")])
def test_within_noise_means_no_more_than_the_noise_of_the_run(ratio: float, mark: str) -> None:
    target = Target("join", "step", "medium/2", "mine", "torch", "1.01", reach=Noise(), aim=Noise())
    assert judge(target, {("medium/2", "mine", "x"): ratio}, noise=1.034).mark == mark


def test_a_row_of_another_group_or_unit_is_no_measurement() -> None:
    assert judge(RATIO, {("gpt", "mine", "x"): 1.0, ("large", "mine", "ms lost"): 1.0}).mark == "not measured"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.kind}-{t.group}-{t.row}-{t.unit}")
def test_each_target_names_an_existing_row_and_group(target: Target) -> None:
    rows = {"staging": staging.row_names("cpu"), "write": write.row_names(), "stall": stall.row_names()}
    rows["join"] = join.row_names()
    groups = {"stall": ["1", "2"], "join": [join.group_name(model, ranks) for model in MODELS for ranks in (2, 4)]}
    assert {target.row, target.torchs} <= set(rows[target.kind])
    assert target.group in groups.get(target.kind, STATES)
    assert isinstance(target.aim, Noise) or isinstance(target.reach, Noise) or target.aim <= target.reach


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
