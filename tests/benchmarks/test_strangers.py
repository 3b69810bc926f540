"""``make bench-strangers``: no rank is lost meanwhile, and every row has its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.benched import bench, rows_by_group
from . import strangers


@pytest.mark.slow
def test_every_row_can_be_measured(tmp_path: Path) -> None:
    found = rows_by_group(bench(strangers.main, tmp_path, "--rounds", "1"))
    assert list(found["small/2"]) == strangers.ROWS
