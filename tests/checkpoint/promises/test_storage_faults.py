"""Storage that fails, hangs or goes away.

What the run does, which call raises, and what the process reports at its end.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.base.shutdown as ending
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.errors import CheckpointError, SaveTimeoutError
from stagereg.testing import run_ranks

from ...benchmarks.faults import FAULTS
from ...support.faulty_storage import FaultyStorage

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No failure of a test must reach the exit status of the tests."""
    yield
    ending._forget()


def test_a_failure_that_was_raised_is_not_reported_again() -> None:
    raised, unraised = CheckpointError("raised"), CheckpointError("new")
    ending.report_error(raised)
    ending.report_error(unraised)
    ending.withdraw_error(raised)
    with pytest.raises(CheckpointError, match="new"):
        ending.finish()


def test_training_goes_on_and_the_end_reports_a_last_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stagereg")
    storage = FaultyStorage(fault="ENOSPC", saves=[2, 4])
    warns = Failure(on_error="warn")
    with Checkpointer(str(tmp_path), every=1, keep=9, failure=warns, storage=storage) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.maybe_save(step, {"x": step})
            checkpointer.wait()
            warned = [each.getMessage() for each in caplog.records if "was not saved" in each.getMessage()]
            assert len(warned) == step // 2
        assert "Step 4 was not saved" in warned[1]
        assert f"The disk of {tmp_path} is full" in warned[1]
        assert f"The newest valid checkpoint is step 3, in {tmp_path}." in warned[1]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
    with pytest.raises(CheckpointError, match=r"the last save, of step 4, failed.*is step 3"):
        ending.finish()
    with Checkpointer(str(tmp_path), failure=Failure(on_error="warn")) as checkpointer:
        checkpointer.save(5, {"x": 5})
    ending.finish()


def test_a_copy_that_fails_is_a_warning_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), failure=Failure(on_error="warn")) as checkpointer:
        checkpointer.save(1, {"x": (value for value in ())})
        assert "Step 1 was not saved" in caplog.text
        checkpointer.save(2, {"x": 2})
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    ending.finish()


def test_while_a_save_hangs_no_memory_is_taken_nor_restored(tmp_path: Path) -> None:
    release = tmp_path / "release"
    storage = FaultyStorage(fault="hang", saves=[1], release=str(release))
    checkpointer = Checkpointer(
        str(tmp_path / "run"), storage=storage, failure=Failure(timeout=datetime.timedelta(milliseconds=100))
    )
    staged: list[int] = []
    stage = checkpointer._stager.stage
    checkpointer._stager.stage = lambda state: staged.append(1) or stage(state)  # type: ignore[method-assign,func-returns-value]
    checkpointer.save(1, {"x": 1})
    with pytest.raises(SaveTimeoutError, match=r"took longer than 0\.1 s \(it is at: writing its files\)"):
        checkpointer.wait()
    for step in range(2, 50):
        with pytest.raises(CheckpointError, match=f"Step {step} was not saved: an earlier save hangs"):
            checkpointer.save(step, {"x": step})
    assert len(staged) == 1
    with pytest.raises(CheckpointError, match="Nothing was restored"):
        checkpointer.restore({"x": 0})
    checkpointer._background.last.timeout_s = 60.0  # of those to come
    release.touch()
    wait_while_it_hangs(checkpointer)
    checkpointer.save(50, {"x": 50})
    checkpointer.wait()
    restored = {"x": 0}
    assert checkpointer.restore(restored) == restored["x"] == 50
    checkpointer.close()


def test_a_save_that_close_gives_up_commits_nothing_later(tmp_path: Path) -> None:
    release = tmp_path / "release"
    storage = FaultyStorage(fault="hang", release=str(release))
    checkpointer = Checkpointer(
        str(tmp_path / "run"), storage=storage, failure=Failure(timeout=datetime.timedelta(milliseconds=100))
    )
    checkpointer.save(1, {"x": 1})
    with pytest.raises(CheckpointError, match="took longer"):
        checkpointer.close()
    with pytest.raises(CheckpointError, match="in use"):
        Checkpointer(str(tmp_path / "run")).lock()
    release.touch()
    assert checkpointer._background.last._under_way[0].over.wait(30)
    assert list((tmp_path / "run").glob("step-*")) == []


def wait_while_it_hangs(checkpointer: Checkpointer) -> None:
    deadline = time.monotonic() + 60
    while checkpointer._background.hanging:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def on_two_ranks(rank: int, world_size: int, root: str) -> list[Any]:
    kept = logging.handlers.BufferingHandler(1000)
    kept.setLevel(logging.WARNING)
    logging.getLogger("stagereg").addHandler(kept)
    release = Path(root) / "release"
    storage = FaultyStorage(fault="hang", saves=[2], ranks=[1], release=str(release))
    checkpointer = Checkpointer(
        f"{root}/run", every=1, keep=9, storage=storage, failure=Failure(timeout=datetime.timedelta(seconds=5))
    )
    errors = []
    for step in (1, 2, 3):
        try:
            checkpointer.maybe_save(step, {"x": torch.full((10,), float(step)), f"rank{rank}": rank})
            checkpointer.wait()
        except CheckpointError as error:
            errors.append(str(error))
    hung = checkpointer._background.hanging
    dist.barrier()
    if rank == 0:
        release.touch()
    wait_while_it_hangs(checkpointer)
    checkpointer._background.finish()
    with contextlib.suppress(CheckpointError):
        checkpointer.wait()
    checkpointer.save(4, {"x": torch.full((10,), 4.0), f"rank{rank}": rank})
    checkpointer.close()
    limited = RankGroup()
    limited.limit = datetime.timedelta(milliseconds=100)
    gone = ""
    if rank == 0:
        try:
            limited.run_on_all("only here", int)
        except CheckpointError as error:
            gone = str(error)
    dist.barrier()
    texts = [*errors, *(record.getMessage() for record in kept.buffer)]
    return [hung, texts, gone, sorted(path.name for path in Path(root, "run").glob("step-*"))]


def test_a_rank_that_hangs_is_named_and_then_all_go_on(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, args=(str(tmp_path),))
    assert first[0]
    assert second[0]
    assert any("rank 0 is at: waiting for the other ranks" in text for text in first[1]), first[1]
    assert any("rank 1 is at: writing its files" in text for text in second[1]), second[1]
    assert any("step 2 was saved after all" in text for text in first[1]), first[1]
    assert first[2].startswith("only here: rank 1 did not reach this exchange within 0.1"), first[2]
    assert first[3] == ["step-00000001", "step-00000002", "step-00000004"]


# -- whole programs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_fault_leaves_what_the_documentation_says() -> None:
    runnable = all(each.stat().st_mode & stat.S_IXOTH for each in Path(sys.base_prefix).resolve().parents)
    names = [name for name in FAULTS if runnable or not FAULTS[name].user]  # by the user of a fault, as far as he gets
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "faults.py"), "--json", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, env=environment)
    if "mount" in done.stderr and done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-4000:]
    results = {name: SimpleNamespace(**result) for name, result in map(json.loads, done.stdout.splitlines())}
    assert list(results) == names
    page = (ROOT / "docs" / "guarantees.md").read_text()
    for name, result in results.items():
        assert result.row in page
        good = [] if name == "deleted" else [1, 2]
        assert result.loads[: len(good)] == good, (name, result)
        assert result.resumes == result.loads[-1], (name, result)
        assert result.status == (0 if result.loads[-1] == 6 else 1), (name, result)
        assert len(result.saw.splitlines()) <= 8, (name, result)
        if result.on_error == "raise" and result.status:
            assert "Step 3 was not saved" in result.saw
        assert "Traceback" not in result.saw
        assert "DIR" in result.saw
