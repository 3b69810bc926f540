"""Whichever rank is killed, and whenever: the next run continues bit for bit from the newest checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.crash_points import POINTS

PROGRAM = str(Path(__file__).parents[2] / "benchmarks" / "kills.py")


def kill(tmp_path: Path, limit_s: float, *asked: str) -> dict[str, list[str]]:
    """Run the matrix; return the rows of its table: kills of one rank, of all, and both, by the moment."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, *asked],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert [name for name in POINTS if int(rows[name][2]) == 0] == []
    assert "0" not in rows["all"][:2]
    return rows


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_is_lost_by_twenty_kills(tmp_path: Path) -> None:
    assert int(kill(tmp_path, 380, "--few", "--kills", "20")["all"][2]) >= 20
