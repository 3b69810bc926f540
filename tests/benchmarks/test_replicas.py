"""``make bench-replicas``: shares of the state, and ratios to the same round, on the slowest rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.benched import bench, rows_by_group
from . import replicas


def saved(folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    sizes = ["--ranks", "2", "--scale", "0.02", "--rounds", "2"]
    return rows_by_group(bench(replicas.main, folder, *sizes, *more))


@pytest.mark.slow
def test_rows_have_times_ratios_and_shares_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = saved(tmp_path, "--rows", "dcp,torch:async_save")
    assert list(found) == ["ddp/2", "fsdp2/2"]
    for name, rows in found.items():
        assert set(rows) == {"dcp", "torch:async_save", "torch:save"}
        each = 1.0 if name == "ddp/2" else 0.5  # of the state that a rank has
        assert rows["torch:save"]["staged"] == [0.0, 0.0]
        assert rows["torch:async_save"]["staged"] == pytest.approx([each, each], abs=0.01)
        assert 0.5 - 0.01 <= min(rows["dcp"]["staged"]) <= max(rows["dcp"]["staged"]) <= each + 0.01
        for row in rows.values():
            assert len(row["seconds"]["samples"]) == len(row["x torch"]["samples"]) == 2
            assert sum(row["written"]) == pytest.approx(1.0, abs=0.2)
            assert 0 < row["blocked"]["median"] <= row["seconds"]["median"]
    out = capsys.readouterr().out
    assert "x torch" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.slow
def test_every_row_of_ranks_can_be_measured(tmp_path: Path) -> None:
    for rows in saved(tmp_path).values():
        assert list(rows) == replicas.row_names()
        assert [row for row in rows.values() if "failure" in row] == []


def test_wrong_arguments_are_refused_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert replicas.main(["--rows", "torch:sav"]) == 2
    assert "Did you mean 'torch:save'" in capsys.readouterr().err
    assert replicas.main(["--models", "fsdp"]) == 2
    assert "Did you mean 'fsdp2'" in capsys.readouterr().err
