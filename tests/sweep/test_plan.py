"""``sweep.json``: which jobs are of the newest sweep, how far they have come, and the command that runs the others."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from stagereg.errors import ConfigError
from stagereg.sweep.number_text import duration
from stagereg.sweep.plan import PLAN, Plan, PlannedJob, Progress, command_to_continue
from stagereg.sweep.result import jobs_in
from stagereg.sweep.reuse import held

from ..support.samples import result, write_hydra


def plan(root: Path, jobs: int = 4, began: float = 0.0) -> Plan:
    planned = [PlannedJob(num, str(num), (f"a={num}", "++sweep.repeat=1"), kept=num == 0) for num in range(jobs)]
    return Plan(root, tuple(planned), "python app.py -m", began, "loss", None, "5%")


def test_a_plan_is_read_as_it_was_written_and_none_is_none(tmp_path: Path) -> None:
    assert Plan.read(tmp_path) is None
    plan(tmp_path).write()
    assert Plan.read(tmp_path) == plan(tmp_path)
    assert os.listdir(tmp_path) == [PLAN]


@pytest.mark.parametrize(
    "text", ["", '{"format": 2, "jobs": []}', '{"format": 1}', '{"format": 1, "jobs": [{"a": 1}]}']
)
def test_a_plan_that_cannot_be_read_is_refused_not_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(
        ConfigError, match=r"cannot read the plan .*sweep.json: .* Move or delete this file to compare all jobs"
    ):
        Plan.read(tmp_path)


def test_own_jobs_are_those_planned_with_the_same_overrides_also_in_a_copy(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for num, override, repeat in ((0, "a=0", 1), (1, "+a=1", 1), (2, "a=2", 0), (3, "a=4", 1), (7, "a=0", 1)):
        result(root / str(num), num, overrides=(override,), repeat=repeat).write()
    plan(root).write()
    for directory in (root, Path(shutil.copytree(root, tmp_path / "b"))):
        found = Plan.read(directory)
        assert found is not None
        own = found.select(jobs_in(directory))
        assert [job.job["num"] for job in own] == [0, 1]


def test_progress_counts_planned_jobs_and_tells_a_running_sweep_from_a_killed_one(tmp_path: Path) -> None:
    result(tmp_path / "0", 0, overrides=("a=0",), repeat=1).write()
    result(tmp_path / "1", 1, overrides=("a=1",), repeat=1, status="failed").write()
    for num in (2, 3, 9):
        write_hydra(tmp_path / str(num), [f"a={num}", "++sweep.repeat=1"], num)
    os.utime(tmp_path / "3" / ".hydra" / "overrides.yaml", (1.0, 1.0))  # of an earlier sweep, not launched yet
    found = plan(tmp_path, 6, began=time.time() - 60)
    assert found.progress(jobs_in(tmp_path)) == Progress(6, 1, 1, 2, False)
    assert found.progress(jobs_in(tmp_path)).text == "1 of 6 completed, 1 failed, 2 stopped, 2 not started"
    with held(tmp_path):
        assert found.progress(jobs_in(tmp_path)).text == "1 of 6 completed, 1 failed, 1 running, 3 not started"
    assert Progress(2, 2, 0, 0, False).text == "2 of 2 completed"


def test_the_time_left_is_that_of_the_jobs_this_sweep_has_ended(tmp_path: Path) -> None:
    """The kept job 0 counts as done, and not for the time; results of an earlier sweep do not count either."""
    found = plan(tmp_path, 5, began=time.time() - 30)
    for num in (0, 1):
        result(tmp_path / str(num), num).write()
        os.utime(tmp_path / str(num) / "result.json", (1.0, 1.0))
    assert found.position(1) == "Job 2 of 5."
    result(tmp_path / "1", 1).write()
    assert found.position(2) == "Job 3 of 5, about 1 min 30 s left."
    result(tmp_path / "3", 3).write()  # by a launcher that runs two at once
    assert found.position(4) == "Job 5 of 5, about 30 s left."
    assert [duration(s) for s in (0.2, 59.6, 3600, 7500)] == ["1 s", "1 min", "1 h", "2 h 5 min"]


@pytest.mark.parametrize(
    ("given", "directory", "added"),
    [
        (["a=1,2"], "multirun/2026-11-28/22-04-05", ["hydra.sweep.dir=multirun/2026-11-28/22-04-05"]),
        (["a=1,2", "hydra.sweep.dir=x"], "x", []),
        (["a='b c',d", "hydra.sweep.dir='x y'"], "x y", []),
        (["hydra.sweep.dir=${now:%s}"], "17", ["hydra.sweep.dir=17"]),
        (["a=1"], "it's (new)", ["hydra.sweep.dir='it\\'s (new)'"]),
    ],
)
def test_the_command_to_continue_names_the_directory_and_works_in_a_shell(
    given: list[str], directory: str, added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", "-m", *given])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "ignore", "app.py", "-m", *given])
    expected = ["python", "-W", "ignore", "app.py", "-m", *given, *added]
    assert shlex.split(command_to_continue(directory)) == expected
