"""``stagereg bench replicas`` and ``restore``: shares of the state, ratios to the same round, on the slowest rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stagereg.bench.replicas as replicas
from stagereg import cli
from stagereg.bench.measure import Series
from stagereg.bench.replicas import BASES, Restoring, measure, row_names
from stagereg.testing import run_ranks

FEW = {"replicas": "dcp,torch:async_save", "restore": "dcp"}


def bench(kind: str, folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    """Rows by the name of the group and their own."""
    file = folder / "result.json"
    arguments = ["--ranks", "2", "--scale", "0.02", "--rounds", "2", "--dir", str(folder), "--json", str(file), *more]
    assert cli.main(["bench", kind, *arguments]) == 0
    groups = json.loads(file.read_text())["groups"]
    assert list(folder.iterdir()) == [file]
    found = {group["name"]: {row["row"]: row for row in group["rows"]} for group in groups}
    assert list(found) == ["ddp/2", "fsdp2/2"]
    return found


@pytest.mark.parametrize("kind", list(BASES))
def test_rows_have_times_ratios_and_shares_by_rank(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(kind, tmp_path, "--rows", FEW[kind])
    for name, rows in found.items():
        assert set(rows) == {*FEW[kind].split(","), *BASES[kind].values()}
        each = 1.0 if name == "ddp/2" else 0.5  # of the state that a rank has
        for row in rows.values():
            assert len(row["seconds"]["samples"]) == 2
            assert set(BASES[kind]) < set(row)
        if kind == "replicas":
            assert rows["torch:save"]["staged"] == [0.0, 0.0]
            assert rows["torch:async_save"]["staged"] == pytest.approx([each, each], abs=0.01)
            assert 0.5 - 0.01 <= min(rows["dcp"]["staged"]) <= max(rows["dcp"]["staged"]) <= each + 0.01
            for row in rows.values():
                assert sum(row["written"]) == pytest.approx(1.0, abs=0.2)
                assert 0 < row["blocked"]["median"] <= row["seconds"]["median"]
        else:
            assert rows["ceiling"]["read"] == pytest.approx([each, each], abs=0.01)
            assert min(rows["dcp"]["read"]) >= each
    out = capsys.readouterr().out
    assert all(head in out for head in BASES[kind])
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(BASES))
def test_every_row_of_ranks_can_be_measured(kind: str, tmp_path: Path) -> None:
    for rows in bench(kind, tmp_path).values():
        assert list(rows) == row_names(kind)
        assert [row for row in rows.values() if "failure" in row] == []


def taken(rank: int, failure: str = "") -> dict[str, Series]:
    samples = {"dcp": [[1.0, 8.0, 1.0], [0.5, 9.0, 4.0]], "torch:load": [[2.0, 10.0, 2.0], [1.0, 18.0, 1.0]]}
    samples |= {"ceiling": [[1.0, 3.0, 1.0], [0.25, 1.0, 0.5]], "dcp:read": [[1.0] * 3, [2.0, 2.0, 9.0]]}
    samples |= {"torch:load:read": [[1.0] * 3] * 2, "ceiling:read": [[0.5] * 3] * 2}
    return {row: Series(row, each[rank], failure if row == "dcp" else "") for row, each in samples.items()}


def test_ratios_are_of_the_slowest_rank_in_one_round() -> None:
    top, line, base = replicas.group("restore", "ddp", 2, [taken(0), taken(1)]).lines
    assert (top.row, line.row, base.row) == ("ceiling", "dcp", "torch:load")
    assert line.samples["seconds"] == [1.0, 9.0, 4.0]
    assert line.samples["x torch"] == [0.5, 0.5, 2.0]
    assert line.samples["x ceiling"] == [1.0, 3.0, 4.0]
    assert line.figures == {"read": [1.0, 2.0]}
    assert [cell.strip() for cell in line.cells[2:]] == ["0.50", "3.00", "1.00 2.00"]


def test_a_failure_of_any_rank_leaves_a_row_no_figures() -> None:
    top, line, _ = replicas.group("restore", "ddp", 2, [taken(0), taken(1, "gone")]).lines
    assert (line.cells, line.failure) == ((), "gone")
    assert not top.failure


def _restored_in_part(rank: int, world: int, folder: Path) -> Any:
    """Measure restores of which rank 1 misses a tensor."""
    whole = Restoring._restore

    def restore(self: Restoring) -> None:
        missed = self.training.model[3].bias.data
        before = missed.clone()
        whole(self)
        if rank == 1 and self.way == "torch:load":
            missed.copy_(before)

    Restoring._restore = restore  # type: ignore[method-assign]
    return measure(rank, world, "restore", "ddp", ["ceiling", "torch:load"], 1, 0.001, folder)


def test_a_restore_that_is_not_what_was_saved_has_failed(tmp_path: Path) -> None:
    for series in run_ranks(_restored_in_part, 2, args=[tmp_path]):
        assert (
            series["torch:load"].failure == "LaunchError: rank 1: ValueError: what was restored is not what was saved"
        )
        assert not series["ceiling"].failure
        assert len(series["ceiling"].samples) == 1
