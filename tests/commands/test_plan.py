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

GIVEN = ("--stage-gib-s", "2", "--write-gib-s", "0.5")
"""Rates, so that nothing is measured."""


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


# -- from a run


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


def test_a_run_without_a_failure_says_nothing_of_how_often_it_fails(
    recorded: Path, command: Command, plan: Plan
) -> None:
    assert "How often does the job fail?" in command("plan", "--run", recorded, code=2).err
    assert plan("--run", recorded, "--mtbf", "1h")["restart_s"] == 300


# -- a cluster

CLUSTER = {"--mtbf": "7.9h", "--nodes": "128", "--copies": "1", "--state": "980GB"}
CLUSTER |= {"--stage-gib-s": "20", "--write-gib-s": "0.5", "--step": "1s"}


def given_as(options: dict[str, str | None]) -> list[str]:
    return [part for name, value in options.items() if value is not None for part in (name, value)]


def test_a_cluster_survives_and_needs_what_the_formulas_say(plan: Plan) -> None:
    seen = plan(*given_as(CLUSTER | {"--domains": "16", "--lost": "4", "--ranks": "1024"}))
    tier, share = seen["tier"], 980e9 / 128
    assert tier["survival"] == pytest.approx([1, 0.9921, 0.9764, 0.9529], abs=1e-4)
    assert tier["domains_survived"] == 16
    assert tier["share_bytes"] == pytest.approx(share)
    assert tier["memory_bytes"] == pytest.approx(4 * share)
    assert tier["copied_s"] == pytest.approx(seen["cost_s"] + share / 2**30)
    assert tier["sent_bytes_s"] == pytest.approx(share / tier["interval_s"])
    assert tier["steps"] == interval.in_steps(interval.best(seen["cost_s"], 7.9 * 3600, tier["copied_s"]), 1.0)


def test_each_tier_has_the_best_interval_for_the_failures_that_it_is_for(plan: Plan) -> None:
    seen = plan(*given_as(CLUSTER | {"--step": None, "--mtbf-cluster": "1000h", "--restart": "10m"}))
    cost_s, mtbf_s, tier = seen["cost_s"], 7.9 * 3600, seen["tier"]
    both_s = mtbf_s**2 / (600 + tier["copied_s"]) * 127  # from one loss of both of a pair to the next
    assert tier["interval_s"] == interval.best(cost_s, mtbf_s, tier["copied_s"])
    assert tier["store_mtbf_s"] == pytest.approx(1 / (1 / 3.6e6 + 1 / both_s))
    assert tier["store_interval_s"] == interval.best(cost_s, tier["store_mtbf_s"], seen["write_s"])
    assert tier["lost"] == interval.lost_fraction(tier["interval_s"], cost_s, mtbf_s, 600, tier["copied_s"])
    more = plan(*given_as(CLUSTER | {"--copies": "2", "--mtbf-cluster": "1000h", "--restart": "10m"}))["tier"]
    assert more["store_mtbf_s"] > tier["store_mtbf_s"]
    assert more["memory_bytes"] == pytest.approx(1.5 * tier["memory_bytes"])
    none = plan(*given_as(CLUSTER | {"--copies": "0", "--link-gib-s": "10"}))["tier"]
    assert (none["survival"], none["sent_bytes_s"]) == ([0, 0, 0], 0)
    assert none["store_mtbf_s"] < mtbf_s


def test_copies_within_one_domain_are_shown_as_lost_with_it(plan: Plan, command: Command) -> None:
    assert plan(*given_as(CLUSTER | {"--domains": "1"}))["tier"]["domains_survived"] == 0
    text = command("plan", *given_as(CLUSTER | {"--domains": "1"})).out
    assert "a domain lost   0% " in text


def test_the_text_of_a_cluster_is_one_screen_and_names_the_settings(command: Command) -> None:
    text = command("plan", *given_as(CLUSTER | {"--domains": "16"})).out
    assert len(text.splitlines()) <= 36
    for part in ("tier.every=", "checkpoint.every=", "128 machines", "in 16 failure domains", "99.21%", "28.5 GiB"):
        assert part in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--nodes": None}, "--nodes is missing"),
        ({"--copies": None, "--nodes": None, "--lost": "3"}, "--lost is for copies on other machines: add --copies"),
        ({"--copies": "128"}, "--copies 128 needs at least 129 machines"),
        ({"--copies": "9"}, "copies must be at most 8"),
        ({"--copies": "-1"}, "--copies: must be above 0"),
        ({"--domains": "129"}, "--domains 129 needs at least 129 machines"),
        ({"--lost": "17"}, "--lost must be at most 16"),
        ({"--link-gib-s": "0"}, "--link-gib-s: must be above 0"),
        ({"--mtbf-per-node": "50000h"}, "Give one"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changed: dict[str, str | None], message: str, command: Command) -> None:
    assert message in command("plan", *given_as(CLUSTER | changed), code=2).err


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


# -- nonsense

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
