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

import stagereg.bench.join_rows as join
from stagereg import cli
from stagereg.bench.join_rows import ENTRY, MODELS, WAYS, Model, Way, measure
from stagereg.bench.measure import Series
from stagereg.errors import JoinError, LaunchError
from stagereg.testing import run_ranks
from stagereg.testing.ranks import RankFailure

COLLECTIVES = {  # of a step beyond those of one without a join
    "off": 0,
    "again:off": 0,
    "torch:on": 2,
    "torch:throw": 3,
    "torch_wire": 2,
    "torch_wire+throw": 3,
    "planned": 0,
    "planned+throw": 0,
    "iterate:planned": 0,
    "counted": 1,
    "counted+throw": 1,
    "iterate:counted": 1,
}


@pytest.mark.slow
def test_every_row_begins_the_collectives_of_its_protocol(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    arguments = ["--models", "small", "--ranks", "2", "--rounds", "2", "--json", str(file)]
    assert cli.main(["bench", "join", *arguments]) == 0
    seen = json.loads(file.read_text())
    (group,) = seen["groups"]
    found = {row["row"]: row for row in group["rows"]}
    assert set(found) == set(join.row_names())
    entries = {row for row in found if row.startswith(ENTRY)}
    assert found.keys() - entries == set(WAYS)
    assert {row: found[row]["collectives"] for row in COLLECTIVES} == COLLECTIVES
    for row in found.values():  # of a step, or of entering and leaving, both held against the step
        by_round = [a / b for a, b in zip(row["step"]["samples"], found["off"]["step"]["samples"], strict=True)]
        assert row["x"]["samples"] == pytest.approx(by_round)
        assert row["ratio"] == pytest.approx(statistics.median(by_round))
        assert all(0 < seconds < 10 for seconds in row["step"]["samples"])
    assert "there is only noise" in group["title"]


def test_rows_without_a_join_are_always_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def failing(fn: Any, nproc: int, args: Any, timeout_s: float) -> Any:
        asked.append((fn, nproc, args))
        raise RankFailure("rank 1 died of SIGABRT", {}, {})

    monkeypatch.setattr(join, "run_ranks", failing)
    with pytest.raises(LaunchError, match="rank 1 died of SIGABRT"):
        join.measured("medium", 4, ["planned", "again:off"], 7)
    assert asked == [(measure, 4, ("medium", ["off", "planned", "again:off"], 7))]


def taken(off: list[float], planned: list[float], entry: list[float], collectives: float) -> Any:
    rows = {"off": off, "planned": planned, "enter+leave:planned": entry}
    return {row: Series(row, samples) for row, samples in rows.items()}, {"off": 3, "planned": collectives}


def test_a_ratio_is_that_of_one_round_on_the_slowest_rank() -> None:
    # The machine is ten times slower in the second round, which is no fault of the row's.
    first = taken([1.0, 10.0, 1.0], [1.1, 11.0, 3.0], [0.5, 4.0, 1.0], 4)
    second = taken([0.5, 5.0, 2.0], [1.2, 12.0, 2.0], [0.25, 6.0, 1.0], 5)
    group = join.group("small", 2, [first, second])
    _, line, entry = group.lines
    assert line.samples["step"] == [1.2, 12.0, 3.0]
    assert line.samples["x"] == pytest.approx([1.2, 1.2, 1.5])
    assert line.figures == {"ratio": pytest.approx(1.2), "p20": pytest.approx(1.2), "collectives": 2}
    assert (entry.row, group.name) == ("enter+leave:planned", "small/2")
    assert entry.samples == {"x": [0.5, 0.6, 0.5], "step": [0.5, 6.0, 1.0]}


def test_a_row_that_failed_has_no_figures() -> None:
    broken = taken([1.0], [], [], 3)
    for row in ("planned", "enter+leave:planned"):
        broken[0][row].failure = "rank 0: JoinError: no"
    line = join.group("small", 1, [broken]).lines[1]
    assert (line.samples, line.figures, line.failure) == ({}, {}, "rank 0: JoinError: no")
    broken[0]["off"] = Series("off", failure="gone")
    assert [line.failure for line in join.group("small", 1, [broken]).lines][:2] == ["gone", "rank 0: JoinError: no"]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0] * 40, 1.0),
        ([0.9] * 15 + [1.0] * 10 + [1.2] * 15, 1.2),  # the median may be anywhere in between
        ([0.5] * 5 + [0.98] * 20 + [1.01] * 20 + [2.0] * 5, 1.02),  # far samples do not move the median
        ([0.8] * 30 + [1.0] * 40 + [1.3] * 30, 1.0),  # more samples are more certain
        ([0.95], 1.05),
    ],
)
def test_noise_is_how_far_the_median_of_two_equal_rows_may_lie(ratios: list[float], expected: float) -> None:
    assert join.noise(ratios) == pytest.approx(expected)


def test_titles_have_the_number_of_parameters() -> None:
    for name, rounded in (("small", "26,1"), ("medium", "2,09")):
        parameters = sum(param.numel() for param in MODELS[name].make().parameters())
        title = join.group(name, 2, [taken([1.0], [1.0], [1.0], 3)]).title
        assert f"{parameters:,}".startswith(rounded)
        assert f" {parameters:,} parameters" in title


class _Failing(Way):
    @contextlib.contextmanager
    def join(self, ddp: Any, batches: Sequence[Any]) -> Iterator[None]:
        yield
        raise ValueError("out of luck")


class _Drifting(Way):
    @contextlib.contextmanager
    def join(self, ddp: Any, batches: Sequence[Any]) -> Iterator[None]:
        with torch.no_grad():
            for param in ddp.parameters():
                param.add_(dist.get_rank())
        yield


def _in_one_process(rank: int, world: int) -> tuple[Any, Any, str]:
    """Measure a way that fails among others; then let a rank drift away."""
    join.WAYS["failing"] = _Failing()
    join.WAYS["drifting"] = _Drifting()
    join.MODELS["tiny"] = Model((4, 4), 2, 2)
    series, counts = measure(rank, world, "tiny", ["off", "failing", "again:off"], 3)
    with pytest.raises(JoinError) as caught:
        measure(rank, world, "tiny", ["drifting"], 1)
    return series, counts, str(caught.value)


def test_a_failing_row_leaves_the_others_and_drift_is_found_out() -> None:
    for series, counts, drift in run_ranks(_in_one_process, 2):
        assert series["failing"].failure == "JoinError: rank 0: ValueError: out of luck"
        assert [len(series[row].samples) for row in ("off", "failing", "again:off")] == [3, 0, 3]
        assert not series["off"].failure
        assert counts["off"] == 1  # the gradients of one bucket
        assert "drifted apart" in drift


@pytest.mark.slow
def test_every_row_can_be_measured_on_every_model_and_four_ranks(tmp_path: Path) -> None:
    assert cli.main(["bench", "join", "--rounds", "2"]) == 0
