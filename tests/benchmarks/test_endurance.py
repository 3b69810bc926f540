"""``make bench-endurance``: leaks of checkpoints are found, and the project's checkpoints have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.registry import register

from .endurance import HEADS, MARKS, Mark, _children, endure, grown, show

ROOT = str(Path(__file__).parents[2])
FLAT: Mark = dict(zip(HEADS, (50, 0.03, 300 << 20, 295_000, 12, 4, 2, 1_600_000, 9), strict=True))


def marks(**each_save: float) -> list[Mark]:
    """Marks of 500 saves, each of which leaves so much behind."""
    found = []
    for number in range(1, MARKS + 1):
        more = {name: int(FLAT[name] + number * 50 * left) for name, left in each_save.items()}
        found.append({**FLAT, "saves": number * 50, **more})
    return found


@pytest.mark.parametrize(
    ("left", "shown"),
    [
        ({}, None),
        ({"objects": 1, "seconds": 1}, None),
        ({"objects": 2}, "objects"),
        ({"memory": 8 << 10}, None),
        ({"memory": 16 << 10}, "memory"),
        ({"descriptors": 1 / 400}, "descriptors"),
        ({"threads": 1 / 400}, "threads"),
        ({"processes": 1 / 400}, "processes"),
        ({"names": 1 / 400}, "names"),
        ({"disk": 1000}, "disk"),
    ],
)
def test_leaks_of_each_save_are_reported(left: dict[str, float], shown: str | None) -> None:
    found = grown(marks(**left))
    assert [line.partition(":")[0] for line in found] == ([shown] if shown else [])


def test_a_table_has_a_line_a_mark_and_fits_120_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show("title", [{**mark, "memory": 64 << 30, "objects": 10**7} for mark in marks()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MARKS + 3 + 1
    assert max(map(len, lines)) <= 120
    assert lines[3].split()[:2] == ["50", "30.0"]


def test_a_stager_that_leaves_files_open_is_seen_in_a_real_run(registry_as_before: None, tmp_path: Path) -> None:
    held: list[int] = []

    @register("stager", "leaking")
    class Leaking(stagereg.BlockingAsyncStager):
        def stage(self, state_dict: dict[str, Any]) -> Any:
            held.append(os.open(os.devnull, os.O_RDONLY))
            return super().stage(state_dict)

    processes = 1 + len(_children(os.getpid()))  # with what earlier tests have started
    seen = endure("leaking", "dcp", 10, 2, tmp_path)
    for descriptor in held:
        os.close(descriptor)
    assert [mark["saves"] for mark in seen] == list(range(1, 11))
    assert seen[-1]["descriptors"] - seen[0]["descriptors"] == 9
    assert "descriptors" in " ".join(grown(seen))
    assert sorted(os.listdir(tmp_path))[-2:] == ["step-00000009", "step-00000010"]
    assert {mark["processes"] for mark in seen} == {processes}
    kept = sum(path.lstat().st_size for path in tmp_path.rglob("step-*/*"))
    assert 0 < seen[-1]["disk"] - kept < 1000, "beside the checkpoints, only who holds the directory"


@pytest.mark.slow
def test_hundreds_of_checkpoints_leave_nothing_behind(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("endurance.py"))
    command = [sys.executable, program, "--saves", "500", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[-1] == ["Nothing", "has", "grown."]
    heads = list(HEADS)
    marks = [dict(zip(heads, line, strict=True)) for line in lines if line and line[0].isdecimal()]
    assert [mark["saves"] for mark in marks] == [str(number) for number in range(50, 501, 50)]
    assert marks[-1]["processes"] == "1"
    assert list(tmp_path.iterdir()) == []
