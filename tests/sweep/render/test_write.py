"""The files that a sweep leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import stagereg.sweep.render as render
from stagereg.sweep.comparison import Comparison


def test_both_files_are_written_and_no_other_is_touched(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "other.txt").write_text("mine")
    paths = render.write(comparison, tmp_path / "new")
    assert tuple(path.name for path in paths) == render.FILES
    assert 'id="table-0"' in paths[-1].read_text()
    assert {path.name for path in (tmp_path / "new").iterdir()} == {*render.FILES, "other.txt"}


def test_importing_it_imports_no_jinja2() -> None:
    code = "import sys, stagereg.sweep.render; print({'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
