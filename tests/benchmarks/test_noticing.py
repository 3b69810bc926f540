"""``make bench-noticing``: ratios to the same round, on the slowest rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.benched import bench, rows_by_group
from . import noticing


@pytest.mark.slow
def test_every_row_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_by_group(bench(noticing.main, tmp_path, "--models", "small", "--rounds", "2"))
    assert list(found["small/2"]) == noticing.ROWS
    for row in found["small/2"].values():
        assert len(row["step"]["samples"]) == len(row["x"]["samples"]) == 2
    assert found["small/2"]["off"]["x"]["samples"] == [1.0, 1.0]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
