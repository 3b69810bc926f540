"""Whichever process is killed, and whenever: the next run continues bit for bit from the newest checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagereg.checkpoint.failpoints import POINTS

MATRIX = Path(__file__).with_name("matrix.py")


def killed(tmp_path: Path, limit_s: float, *asked: str) -> dict[str, Any]:
    """Run the matrix and return its counts, which are printed as well."""
    seen = tmp_path / "counts.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(MATRIX), "--json", str(seen), *asked],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    counts: dict[str, Any] = json.loads(seen.read_text())
    return counts


def check(counts: dict[str, Any], kills: int) -> None:
    assert counts["kills"] >= kills
    by_moment = {row[0]: dict(zip(counts["heads"], row, strict=True)) for row in counts["rows"]}
    assert [name for name in POINTS if by_moment[name]["kills"] == "0"] == []
    assert set(counts["reached"]) == set(POINTS)
    for victim in ("one rank", "all ranks", "the writer"):
        assert by_moment["all"][victim] != "0"


@pytest.mark.timeout(400)
def test_nothing_is_lost_by_thirty_kills(tmp_path: Path) -> None:
    check(killed(tmp_path, 380, "--few", "--kills", "30"), 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_by_three_hundred_kills(tmp_path: Path) -> None:
    check(killed(tmp_path, 3500, "--kills", "300", "--seed", str(int.from_bytes(os.urandom(3)))), 300)
