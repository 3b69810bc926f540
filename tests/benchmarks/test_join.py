"""``make bench-join``: ratios by round, the same turns on all ranks."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stagereg.bench.measure import Series
from stagereg.testing import run_ranks

from ..support.benched import bench, rows_by_group
from . import join
from .join import BASE, ENTRY, WAYS, WHOLE, Model, Way, measure


@pytest.mark.slow
def test_every_row_is_a_ratio_to_the_same_rounds_step(tmp_path: Path) -> None:
    seen = bench(join.main, tmp_path, "--models", "small", "--ranks", "2", "--rounds", "2", disk=False)
    found = rows_by_group(seen)["small/2"]
    assert set(found) == set(join.row_names())
    entries = {row for row in found if row.startswith(ENTRY)}
    blocks = {row for row in found if row.startswith(WHOLE)}
    assert found.keys() - entries - blocks == set(WAYS)
    for name, row in found.items():  # of a step, or of entering and leaving, both held against the step
        base = found[f"{WHOLE}{BASE}" if name in blocks else BASE]["step"]["samples"]
        by_round = [a / b for a, b in zip(row["step"]["samples"], base, strict=True)]
        assert row["x"]["samples"] == pytest.approx(by_round)
        assert row["ratio"] == pytest.approx(statistics.median(by_round))
        assert all(0 < seconds < 10 for seconds in row["step"]["samples"])


def taken(off: list[float], planned: list[float], entry: list[float]) -> Any:
    rows = {"off": off, "planned": planned, "enter+leave:off": off, "enter+leave:planned": entry}
    return {row: Series(row, samples) for row, samples in rows.items()}


def test_a_ratio_is_that_of_one_round_on_the_slowest_rank() -> None:
    # The machine is ten times slower in the second round, which is no fault of the row's.
    first = taken([1.0, 10.0, 1.0], [1.1, 11.0, 3.0], [0.5, 4.0, 1.0])
    second = taken([0.5, 5.0, 2.0], [1.2, 12.0, 2.0], [0.25, 6.0, 1.0])
    group = join.group("small", 2, [first, second])
    _, line, _, entry = group.lines
    assert line.samples["step"] == [1.2, 12.0, 3.0]
    assert line.samples["x"] == pytest.approx([1.2, 1.2, 1.5])
    assert line.figures == {"ratio": pytest.approx(1.2)}
    assert (entry.row, group.name) == ("enter+leave:planned", "small/2")
    assert entry.samples == {"x": [0.5, 0.6, 0.5], "step": [0.5, 6.0, 1.0]}


def test_a_row_that_failed_has_no_figures() -> None:
    broken = taken([1.0], [], [])
    for row in ("planned", "enter+leave:planned"):
        broken[row].failure = "rank 0: JoinError: no"
    line = join.group("small", 1, [broken]).lines[1]
    assert (line.samples, line.figures, line.failure) == ({}, {}, "rank 0: JoinError: no")
    broken["off"] = Series("off", failure="gone")
    assert [line.failure for line in join.group("small", 1, [broken]).lines][:2] == ["gone", "rank 0: JoinError: no"]


class _Failing(Way):
    @contextlib.contextmanager
    def join(self, ddp: Any, batches: Sequence[Any]) -> Iterator[None]:
        yield
        raise ValueError("out of luck")


def _one_that_fails(rank: int, world: int) -> Any:
    """Measure a way that fails among others."""
    join.WAYS["failing"] = _Failing()
    join.MODELS["tiny"] = Model((4, 4), 2, 2)
    return measure(rank, world, "tiny", ["off", "failing", "again:off"], 3)


@pytest.mark.slow
def test_a_failing_row_leaves_the_others() -> None:
    for series in run_ranks(_one_that_fails, 2):
        assert series["failing"].failure == "LaunchError: rank 0: ValueError: out of luck"
        assert [len(series[row].samples) for row in ("off", "failing", "again:off")] == [3, 0, 3]
        assert not series["off"].failure
