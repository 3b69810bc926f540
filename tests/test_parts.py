"""The report at the end of ``make test-all`` and ``make nightly``: each part, its result, and what it skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PARTS = Path(__file__).parent / "support" / "parts.py"
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_some(number):
    if number:
        pytest.skip("no such machine")
"""


def test_every_part_is_reported_with_what_it_skipped_though_one_failed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    parts = ["breaks", "exit 3", "tests", f"{sys.executable} -m pytest -q test_it.py"]
    parts += ["versions", "echo 'nox > Session python-3.14 skipped: Python interpreter 3.14 not found.'"]
    done = subprocess.run([sys.executable, PARTS, *parts], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    report = re.sub(r"in \d+ min \d\d s|in [\d.]+s", "in TIME", done.stdout.partition("\nRan:\n")[2])
    assert report.splitlines() == [
        "breaks: failed with exit code 3 in TIME",
        "tests: passed in TIME",
        "  1 passed, 3 skipped in TIME",
        "  skipped 3: no such machine",
        "versions: passed in TIME",
        "  skipped 1: python-3.14 skipped: Python interpreter 3.14 not found.",
    ]
