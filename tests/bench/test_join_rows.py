"""``stagereg bench join``: ratios by round, collectives counted on the wire, the same turns on all ranks."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.bench.join_rank as joinrank
import stagereg.bench.join_rows as join
from stagereg import cli
from stagereg.bench.join_rank import MODELS, WAYS, Model, Taken, TrafficCounter, Way, measure, turns
from stagereg.errors import LaunchError
from stagereg.testing import run_ranks
from stagereg.testing.ranks import RankFailure

COLLECTIVES = {  # of a step beyond those of one without a join: all of them, and those that are waited for
    "off": (0, 0),
    "again:off": (0, 0),
    "torch:on": (2, 0),
    "torch:throw": (3, 1),
    "torch_wire": (2, 0),
    "torch_wire+throw": (3, 1),
    "planned": (0, 0),
    "planned+throw": (0, 0),
    "iterate:planned": (0, 0),
    "counted": (1, 0),
    "counted+throw": (1, 0),
    "iterate:counted": (1, 0),
}


@pytest.mark.slow
def test_every_row_begins_as_many_collectives_as_its_protocol_shows(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    arguments = ["--models", "small", "--ranks", "2", "--rounds", "2", "--json", str(file)]
    assert cli.main(["bench", "join", *arguments]) == 0
    seen = json.loads(file.read_text())
    (group,) = seen["groups"]
    found = {row["row"]: row for row in group["rows"]}
    assert set(found) == set(join.row_names())
    entries = {row for row in found if row.startswith(join.ENTRY)}
    assert found.keys() - entries == set(WAYS)
    assert {row: (found[row]["collectives"], found[row]["blocking"]) for row in COLLECTIVES} == COLLECTIVES
    for row in found.values():  # of a step, or of entering and leaving, both held against the step
        by_round = [a / b for a, b in zip(row["step"]["samples"], found["off"]["step"]["samples"], strict=True)]
        assert row["x"]["samples"] == pytest.approx(by_round)
        assert row["ratio"] == pytest.approx(statistics.median(by_round))
        assert all(0 < seconds < 10 for seconds in row["step"]["samples"])
    marks = {(target["row"], target["unit"]): target["mark"] for target in seen["targets"]}
    assert marks["counted+throw", "collectives"] == marks["planned+throw", "collectives"] == "aim reached"
    assert not [target for target in seen["targets"] if target["group"] != "small/2"]


def test_the_rows_without_a_join_are_always_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(join, "run_ranks", lambda fn, nproc, args, timeout_s: asked.append((fn, nproc, args)))
    join.measured("medium", 4, ["planned", "again:off"], 7)
    assert asked == [(measure, 4, ("medium", ["off", "planned", "again:off"], 7))]


def test_ranks_that_fail_are_an_error_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RankFailure("rank 1 died of SIGABRT", {}, {})

    monkeypatch.setattr(join, "run_ranks", failing)
    with pytest.raises(LaunchError, match="rank 1 died of SIGABRT"):
        join.measured("small", 2, ["off"], 1)


def test_a_ratio_is_that_of_one_round_on_the_slowest_rank() -> None:
    # The machine is ten times slower in the second round, which is no fault of the row's.
    first = {"off": Taken([1.0, 10.0, 1.0], 3, 0), "mine": Taken([1.1, 11.0, 3.0], 4, 1)}
    second = {"off": Taken([0.5, 5.0, 2.0], 3, 0), "mine": Taken([1.2, 12.0, 2.0], 5, 1)}
    group = join.group("small", 2, [first, second])
    line = next(line for line in group.lines if line.row == "mine")
    assert line.samples["step"] == [1.2, 12.0, 3.0]
    assert line.samples["x"] == pytest.approx([1.2, 1.2, 1.5])
    assert line.ratio == pytest.approx(1.2)
    assert line.figures == {"p20": pytest.approx(1.2), "collectives": 2, "blocking": 1}
    assert group.name == "small/2"


def test_entering_and_leaving_is_held_against_the_step_of_its_round() -> None:
    first = {"off": Taken([1.0, 10.0]), "planned": Taken([1.1, 11.0], entry_seconds=[0.5, 4.0])}
    second = {"off": Taken([0.5, 5.0]), "planned": Taken([1.2, 12.0], entry_seconds=[0.25, 6.0])}
    lines = {line.row: line for line in join.group("small", 2, [first, second]).lines}
    assert list(lines) == ["off", "planned", "enter+leave:planned"]
    assert lines["enter+leave:planned"].samples == {"x": [0.5, 0.6], "step": [0.5, 6.0]}


def test_a_row_that_failed_has_no_figures() -> None:
    taken = {"off": Taken([1.0]), "mine": Taken([1.0], failure="rank 0: JoinError: no")}
    line = join.group("small", 1, [taken]).lines[1]
    assert (line.samples, line.ratio, line.failure) == ({}, None, "rank 0: JoinError: no")
    taken["off"].failure = "gone"
    assert [line.failure for line in join.group("small", 1, [taken]).lines] == ["gone", "rank 0: JoinError: no"]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0] * 40, 1.0),
        ([0.9] * 15 + [1.0] * 10 + [1.2] * 15, 1.2),  # the median may be anywhere in between
        ([0.5] * 5 + [0.98] * 20 + [1.01] * 20 + [2.0] * 5, 1.02),  # far samples do not move the median
        (
            [0.8] * 30 + [1.0] * 40 + [1.3] * 30,
            1.0,
        ),  # more samples are more certain: the spread of half of them is no measure
        ([0.95], 1.05),
    ],
)
def test_noise_is_how_far_from_one_the_median_of_two_equal_rows_may_lie(ratios: list[float], expected: float) -> None:
    assert join.noise(ratios) == pytest.approx(expected)


def test_turns_are_the_same_on_all_ranks_and_change_from_round_to_round() -> None:
    rows = list(WAYS)
    orders = [turns(rows, number) for number in range(20)]
    assert all(sorted(order) == sorted(rows) for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    assert orders == [turns(rows, number) for number in range(20)]


def test_models_are_of_the_sizes_that_targets_name() -> None:
    for name, parameters in (("small", 26_000), ("medium", 2_100_000)):
        made = sum(param.numel() for param in MODELS[name].make().parameters())
        assert made == MODELS[name].parameters == pytest.approx(parameters, rel=0.01)


@contextlib.contextmanager
def _failing(ddp: Any, batches: Sequence[Any]) -> Iterator[None]:
    yield
    raise ValueError("out of luck")


def _in_one_process(rank: int, world: int) -> tuple[dict[str, Taken], list[tuple[int, int]], str]:
    """Measure a way that fails among others; count collectives of several kinds; then let a rank drift away."""
    joinrank.WAYS["failing"] = Way(_failing)
    joinrank.MODELS["tiny"] = Model((4, 4), 2, 2)
    taken = measure(rank, world, "tiny", ["off", "failing", "again:off"], 3)
    side = dist.new_group(backend="gloo")
    counted = []
    for group in (None, side):
        wire = TrafficCounter()
        wire.start()
        dist.all_reduce(torch.ones(1), group=group)
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier(group=group)
        wire.stop()
        dist.all_reduce(torch.ones(1), group=group)
        counted.append((wire.collectives, wire.blocking))
    joinrank.WAYS["drifting"] = Way(_drifting)
    try:
        measure(rank, world, "tiny", ["drifting"], 1)
    except Exception as error:
        return taken, counted, str(error)
    return taken, counted, ""


@contextlib.contextmanager
def _drifting(ddp: Any, batches: Sequence[Any]) -> Iterator[None]:
    with torch.no_grad():
        for param in ddp.parameters():
            param.add_(dist.get_rank())
    yield


def test_a_failing_row_leaves_the_others_their_figures_and_ranks_that_drift_are_found_out() -> None:
    for taken, counted, drift in run_ranks(_in_one_process, 2):
        assert taken["failing"].failure == "rank 0: ValueError: out of luck"
        assert taken["failing"].seconds == []  # it is left out after the round that warms up
        assert [len(taken[row].seconds) for row in ("off", "again:off")] == [3, 3]
        assert not taken["off"].failure
        assert taken["off"].collectives == 1  # the gradients of one bucket
        assert counted == [(3, 2)] * 2
        assert "drifted apart" in drift


@pytest.mark.slow
def test_every_row_can_be_measured_on_every_model_and_four_ranks(tmp_path: Path) -> None:
    assert cli.main(["bench", "join", "--rounds", "2"]) == 0
