"""``make bench-restore``: shares of the state, ratios to the same round, on the slowest rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagereg.bench.measure import Series
from stagereg.bench.report import Line
from stagereg.testing import run_ranks

from ..support.benched import bench, rows_by_group
from . import restore
from .restore import BASES, Restoring, line, measure, row_names


def restored(folder: Path) -> dict[str, dict[str, Any]]:
    sizes = ["--ranks", "2", "--scale", "0.02", "--rounds", "2"]
    found = rows_by_group(bench(restore.main, folder, *sizes))
    assert list(found) == ["ddp/2", "fsdp2/2"]
    return found


@pytest.mark.slow
def test_rows_have_times_ratios_and_shares_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in restored(tmp_path).items():
        assert list(rows) == row_names()
        each = 1.0 if name == "ddp/2" else 0.5  # of the state that a rank has
        for row in rows.values():
            assert len(row["seconds"]["samples"]) == 2
            assert set(BASES) < set(row)
        assert rows["ceiling"]["read"] == pytest.approx([each, each], abs=0.01)
        assert min(rows["dcp"]["read"]) >= each
    out = capsys.readouterr().out
    assert all(head in out for head in BASES)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "fsdp"], "Did you mean 'fsdp2'"),
        (["--rows", "torch:save"], "unknown row 'torch:save'"),
        (["--ranks", "0"], "--ranks requires integers of at least 1, got '0'"),
        (["--dir", "/nowhere/at/all"], "cannot write in /nowhere/at/all"),
    ],
)
def test_wrong_arguments_are_refused_on_one_screen(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restore.main(arguments) == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert (seen.out, len(seen.err.splitlines()) <= 5) == ("", True)


def taken(rank: int, failure: str = "") -> dict[str, Series]:
    samples = {"dcp": [[1.0, 8.0, 1.0], [0.5, 9.0, 4.0]], "torch:load": [[2.0, 10.0, 2.0], [1.0, 18.0, 1.0]]}
    samples |= {"ceiling": [[1.0, 3.0, 1.0], [0.25, 1.0, 0.5]], "dcp:read": [[1.0] * 3, [2.0, 2.0, 9.0]]}
    samples |= {"torch:load:read": [[1.0] * 3] * 2, "ceiling:read": [[0.5] * 3] * 2}
    return {row: Series(row, each[rank], failure if row == "dcp" else "") for row, each in samples.items()}


def lines(*ranks: dict[str, Series]) -> list[Line]:
    return [line(row, ranks, BASES, ["read"]) for row in ("ceiling", "dcp", "torch:load")]


def test_ratios_are_of_the_slowest_rank_in_one_round() -> None:
    top, mine, base = lines(taken(0), taken(1))
    assert (top.row, mine.row, base.row) == ("ceiling", "dcp", "torch:load")
    assert mine.samples["seconds"] == [1.0, 9.0, 4.0]
    assert mine.samples["x torch"] == [0.5, 0.5, 2.0]
    assert mine.samples["x ceiling"] == [1.0, 3.0, 4.0]
    assert mine.figures == {"read": [1.0, 2.0]}
    assert [cell.strip() for cell in mine.cells[2:]] == ["0.50", "3.00", "1.00 2.00"]


def test_a_failure_of_any_rank_leaves_a_row_no_figures() -> None:
    top, mine, _ = lines(taken(0), taken(1, "gone"))
    assert (mine.cells, mine.failure) == ((), "gone")
    assert not top.failure


def _restored_in_part(rank: int, world: int, folder: Path) -> Any:
    """Measure restores of which rank 1 misses a tensor."""
    whole = Restoring.restore

    def restore(self: Restoring) -> None:
        missed = self.training.model[3].bias.data
        before = missed.clone()
        whole(self)
        if rank == 1 and self.way == "torch:load":
            missed.copy_(before)

    Restoring.restore = restore  # type: ignore[method-assign]
    return measure(rank, world, "ddp", ["ceiling", "torch:load"], 1, 0.001, folder)


@pytest.mark.slow
def test_a_restore_that_is_not_what_was_saved_has_failed(tmp_path: Path) -> None:
    for series in run_ranks(_restored_in_part, 2, args=[tmp_path]):
        assert (
            series["torch:load"].failure == "LaunchError: rank 1: ValueError: what was restored is not what was saved"
        )
        assert not series["ceiling"].failure
        assert len(series["ceiling"].samples) == 1
