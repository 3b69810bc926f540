"""``stagereg plan``: its interval is the best one, it names the sources of its times, and it refuses nonsense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.save.interval as interval
from stagereg.commands.planning import Job

from ..support.samples import BEGAN, Sample, write_events, write_run
from .conftest import Command

Plan = Callable[..., dict[str, Any]]

GIVEN = ("--stage-gib-s", "2", "--write-gib-s", "0.5")  # rates, so that nothing is measured


@pytest.fixture
def plan(command: Command) -> Plan:
    return lambda *arguments: command("plan", "--json", *arguments).json


def test_the_interval_is_the_best_for_each_ranks_share(plan: Plan) -> None:
    seen = plan("--mtbf", "6h", "--ranks", "1024", "--state", "1TiB", "--step", "1.2s", *GIVEN)
    assert (seen["cost_s"], seen["write_s"]) == (0.5, 0.5 + 2.0)  # 1 GiB a rank
    assert seen["steps"] == round(interval.optimum(0.5, 6 * 3600) / 1.2)
    assert seen["interval_s"] == seen["steps"] * 1.2
    table = {one["name"]: one for one in seen["intervals"]}
    assert table["Young 1974"]["interval_s"] == interval.young(0.5, 6 * 3600)
    assert table["Daly 2006"]["interval_s"] == interval.daly(0.5, 6 * 3600)
    lost = table["least is lost"]["lost"]
    assert lost == pytest.approx(min(one["lost"] for one in table.values()), rel=1e-6)
    assert lost == interval.lost_fraction(seen["interval_s"], 0.5, 6 * 3600, 300, 2.5)


def test_restarts_machines_and_slow_writing_count(plan: Plan) -> None:
    seen = plan("--mtbf", "6h", "--restart", "0s", "--state", "1GiB", *GIVEN)
    assert (seen["restart_s"], {one["restarts"] for one in seen["intervals"]}) == (0, {0})
    seen = plan("--mtbf-per-node", "50000h", "--nodes", "128", "--state", "8GiB", *GIVEN)
    assert (seen["mtbf_s"], seen["steps"]) == (50000 * 3600 / 128, None)
    seen = plan("--mtbf", "10h", "--state", "20GiB", "--stage-gib-s", "20", "--write-gib-s", "0.01")
    assert seen["interval_s"] == seen["least_s"] == pytest.approx(2000)


@pytest.mark.parametrize(("mtbf", "hardly"), [("6h", False), ("5m", True), ("1s", True)])
def test_the_text_names_settings_assumptions_and_sources(mtbf: str, hardly: bool, command: Command) -> None:
    seen = command("plan", "--mtbf", mtbf, "--state", "1TiB", "--ranks", "1024", "--step", "1.2s", *GIVEN).out
    assert ("hardly get on" in seen) == hardly
    assert ("checkpoint.every=122" in seen) != hardly
    for part in (f"failure.mtbf={mtbf}", "whole job", "Young", "Daly", "Vaidya", "Given: 2 GiB/s", "at random"):
        assert part in seen


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of one rank: 11 steps of 1 s, two checkpoints of 400 KB that hold the loop 2 s and are there after 5 s."""
    times = {"step_s": 1.0, "slower_s": 0.0, "stall_s": 2.0, "stage_s": 2.0, "write_s": 3.0}
    return write_run(tmp_path / "run", Sample(ranks=1, steps=11, every=4, nbytes=400_000, **times))


def test_the_times_of_a_run_are_scaled_to_the_bytes_of_a_rank(recorded: Path, plan: Plan) -> None:
    seen = plan("--mtbf", "1h", "--run", recorded)
    assert (seen["state_bytes"], seen["ranks"]) == (400_000, 1)
    assert (seen["cost_s"], seen["write_s"], seen["step_s"]) == pytest.approx((2.0, 5.0, 1.0))
    assert seen["steps"] == round(interval.optimum(2.0, 3600))
    assert "2 checkpoints" in " ".join(seen["sources"])
    seen = plan("--mtbf", "1h", "--run", recorded, "--state", "8MB", "--ranks", "4", "--step", "3s")
    assert (seen["cost_s"], seen["write_s"], seen["step_s"]) == pytest.approx((10.0, 25.0, 3.0))
    assert "5 times as many bytes" in " ".join(seen["sources"])


def test_a_run_without_a_checkpoint_is_refused(recorded: Path, command: Command) -> None:
    file = recorded / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines(keepends=True) if '"write"' not in line]
    file.write_text("".join(lines))
    assert "no checkpoint was completed" in command("plan", "--mtbf", "6h", "--run", recorded, code=2).err


def test_failures_of_a_run_are_planned_with_unless_others_are_given(recorded: Path, plan: Plan) -> None:
    phases = {"noticed": 10.0, "started": 20.0, "first step": 6.0}
    restart = {
        "event": "restart",
        "t": BEGAN,
        "step": 1,
        "number": 1,
        "why": "x",
        "since": BEGAN - 500,
        "phases": phases,
    }
    write_events(recorded / "metrics.jsonl", [restart])
    seen = plan("--run", recorded)
    assert (seen["mtbf_s"], seen["restart_s"]) == (pytest.approx(500, rel=0.1), 36.0)
    assert "Failures, from there too: 1 in 8m3" in " ".join(seen["sources"])
    seen = plan("--run", recorded, "--mtbf", "1h", "--restart", "1m")
    assert (seen["mtbf_s"], seen["restart_s"], "from there too" in " ".join(seen["sources"])) == (3600, 60, False)
    seen = plan("--run", recorded, "--mtbf-per-node", "100h", "--nodes", "2")
    assert (seen["mtbf_s"], seen["restart_s"]) == (50 * 3600, 36.0)


def test_a_run_without_failure_says_nothing_of_how_often_it_fails(recorded: Path, command: Command, plan: Plan) -> None:
    assert "How often does the job fail?" in command("plan", "--run", recorded, code=2).err
    assert plan("--run", recorded, "--mtbf", "1h")["restart_s"] == 300


TIMES = st.floats(-3, 6).map(lambda power: 10.0**power)


@settings(deadline=None)
@given(TIMES, TIMES, st.floats(0, 1e5), TIMES)
def test_the_parts_make_up_the_whole(cost: float, write: float, restart: float, mtbf: float) -> None:
    job = Job(1, 1, cost, write, [], restart_s=restart, mtbf_s=mtbf)
    best_s = interval.best(cost, mtbf, write)
    for loss in (job.loss(best_s), job.loss(best_s / 3), job.loss(best_s * 3)):
        parts = (loss["checkpoints"], loss["twice"], loss["restarts"])
        assert min(parts) >= -1e-12
        assert sum(parts) == pytest.approx(loss["lost"], abs=1e-9)


GOOD = {"--mtbf": "6h", "--state": "1GiB", "--stage-gib-s": "2", "--write-gib-s": "0.5"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--mtbf": None}, "How often does the job fail"),
        ({"--mtbf": "0h"}, "--mtbf: must be above 0, not '0h'"),
        ({"--mtbf": "6 parsecs"}, "--mtbf: '6 parsecs' has no unit of time"),
        ({"--mtbf-per-node": "9h", "--nodes": "3"}, "Give one"),
        ({"--nodes": "3"}, "--mtbf-per-node 50000h --nodes 128"),
        ({"--mtbf": None, "--mtbf-per-node": "9h"}, "stagereg: --nodes is missing: the two go together."),
        ({"--mtbf": None, "--nodes": "3"}, "stagereg: --mtbf-per-node is missing: the two go together."),
        ({"--state": None}, "How large is a checkpoint"),
        ({"--state": "1 lightyear"}, "--state: '1 lightyear'"),
        ({"--ranks": "1.5"}, "--ranks: "),
        ({"--stage-gib-s": None}, "or both rates"),
        ({"--write-gib-s": "nan"}, "--write-gib-s: must be above 0"),
        ({"--restart": "-5m"}, "--restart: "),
        ({"--run": "/nowhere"}, "or both rates"),
        ({"--run": "/nowhere", "--stage-gib-s": None, "--write-gib-s": None}, "/nowhere"),
    ],
)
def test_nonsense_is_refused_on_one_screen(changed: dict[str, str | None], message: str, command: Command) -> None:
    arguments = [part for name, value in (GOOD | changed).items() if value is not None for part in (name, value)]
    printed = command("plan", *arguments, code=2)
    assert message in printed.err
    assert printed.out == ""
