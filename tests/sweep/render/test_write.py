"""The four files that a sweep leaves: each is written if possible, and one line reports the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stagereg.sweep.render as render
from stagereg.sweep.comparison import Comparison

from ...support.samples import compared, row_of


def test_all_four_files_are_written_with_the_picture_in_the_page(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need ./stagereg[report]")
    paths = render.write(comparison, tmp_path / "new" / "report")
    assert tuple(path.name for path in paths) == render.FILES
    assert all(path.stat().st_size for path in paths)
    assert paths[-1].read_text().partition("<details")[0].count("svg+xml") == 1
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_is_printed_and_the_rest_there(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    paths = render.write(comparison, tmp_path)
    assert [path.name for path in paths] == ["compare.csv", "report.html"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "pip install './stagereg[report]'" in printed.err
    assert 'id="table-0"' in paths[-1].read_text()


def test_where_all_failed_no_older_picture_stays(tmp_path: Path) -> None:
    failed = compared([row_of({"a": "1"}, {}, error="boom"), row_of({"a": "2"}, {}, error="boom")])
    (tmp_path / "compare.svg").write_text("of yesterday")
    (tmp_path / "other.txt").write_text("mine")
    names = {path.name for path in render.write(failed, tmp_path)}
    assert names == {"compare.csv", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"other.txt"}


def test_importing_it_imports_neither_matplotlib_nor_jinja2() -> None:
    code = "import sys, stagereg.sweep.render; print({'matplotlib', 'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
