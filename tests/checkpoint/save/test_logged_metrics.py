"""What is logged about a step that is saved stays with its checkpoint, whenever it is logged; memory is bounded."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.options import Leave
from stagereg.checkpoint.save.logged_metrics import LoggedMetrics
from stagereg.checkpoint.store.open_store import open_store
from stagereg.testing.ranks import run_ranks

from ...support.forks import run_forked
from ...support.watching import watching


def metrics(root: object) -> dict[int, dict[str, float]]:
    """As another process finds them, by step."""
    store = open_store(str(root))
    return {each.manifest.step: store.notes.metrics_of(each.manifest) for each in store.checkpoints()[0]}


def written(root: Path, step: int) -> dict[str, Any]:
    manifest = json.loads((root / f"step-{step:08}" / "manifest.json").read_text())
    return manifest.get("metrics", {})


def test_what_is_logged_before_the_commit_is_in_the_manifest(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every=2) as checkpointer:
        for step in range(1, 5):
            stagereg.log(step, loss=1 / step, inf=float("-inf"))
            checkpointer.maybe_save(step, {"x": step})
    assert written(tmp_path, 4) == {"loss": 0.25, "inf": "-inf"}
    assert not (tmp_path / "metrics.json").exists()


def test_what_is_logged_while_it_is_written_is_not_lost(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "written":
            reached.set()
            go_on.wait(30)

    with watching(hold), Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": 1})
        assert reached.wait(30)
        stagereg.log(1, held_out=2.5)
        go_on.set()
    assert written(tmp_path, 1) == {"held_out": 2.5}


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_logged_after_the_commit_is_kept_beside(tmp_path: Path, remote: bool) -> None:
    root = f"memory://{tmp_path.name}-metrics" if remote else str(tmp_path)
    with Checkpointer(root, keep=2) as checkpointer:
        for step in range(1, 4):
            stagereg.log(step, loss=0.5)
            checkpointer.save(step, {"x": step})
            checkpointer.wait()
            stagereg.log(step, loss=0.25 * step, held_out=float("nan"))
    assert repr(metrics(root)) == repr(
        {3: {"loss": 0.75, "held_out": float("nan")}, 2: {"loss": 0.5, "held_out": float("nan")}}
    )
    with Checkpointer(root, keep=2) as checkpointer:
        assert checkpointer.restore({"x": 0}) == 3
        checkpointer.save(4, {"x": 4})
    assert repr(metrics(root)) == repr({4: {}, 3: {"loss": 0.75, "held_out": float("nan")}})


def test_going_back_forgets_what_was_logged_on_the_way(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), leave=Leave(save_last=False)) as checkpointer:
        checkpointer.save(1, {"x": 1})
        stagereg.log(2, loss=9.0)
        checkpointer.restore({"x": 0})
        checkpointer.save(2, {"x": 2})
    assert metrics(tmp_path) == {2: {}, 1: {}}


def test_a_step_that_is_saved_again_has_its_own_metrics(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with Checkpointer(str(tmp_path)) as checkpointer:
            checkpointer.save(1, {"x": 1})
            checkpointer.wait()
            assert metrics(tmp_path) == {1: {}}
            stagereg.log(1, loss=loss)
        assert metrics(tmp_path) == {1: {"loss": loss}}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": {}}', '{"1": {"loss": "much"}}', "[" * 100_000])
def test_a_damaged_file_of_metrics_is_passed_over(tmp_path: Path, caplog: Any, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": 1})
        checkpointer.wait()
        stagereg.log(1, loss=0.5)
    assert metrics(tmp_path) == {1: {"loss": 0.5}}
    assert "metrics.json is passed over" in caplog.text


KILLED = """
import os, signal, sys, time, stagereg
from stagereg import Checkpointer
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": 1})
    checkpointer.wait()
    stagereg.log(1, held_out=2.5)
    ends = time.monotonic() + 60
    while not os.path.exists(f"{sys.argv[1]}/metrics.json") and time.monotonic() < ends:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_metric_that_is_logged_late_outlives_a_kill(tmp_path: Path) -> None:
    """Training does nothing after it: it is not for the next save, or the end, to write it."""
    assert run_forked(KILLED, tmp_path).returncode == -signal.SIGKILL
    assert metrics(tmp_path) == {1: {"held_out": 2.5}}


def test_metrics_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog: Any) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        (tmp_path / ".metrics.json.tmp").mkdir()  # a start would delete it
        checkpointer.save(1, {"x": 1})
        checkpointer.wait()
        stagereg.log(1, loss=0.5)
        checkpointer._background.finish()
        assert "metrics are not written" in caplog.text
        os.rmdir(tmp_path / ".metrics.json.tmp")
        checkpointer.save(2, {"x": 2})
    assert metrics(tmp_path) == {2: {}, 1: {"loss": 0.5}}


def test_metrics_after_close_are_for_nobody(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": 1})
    stagereg.log(1, loss=0.5)
    assert checkpointer._background.finish()
    assert metrics(tmp_path) == {1: {}}


def two_ranks(rank: int, world_size: int, root: str) -> None:
    with Checkpointer(root, leave=Leave(grace=None)) as checkpointer:
        stagereg.log(1, **{f"of_rank_{rank}": 1.0, "both": float(rank)})
        checkpointer.save(1, {"x": 1})


def test_metrics_are_those_of_rank_0(tmp_path: Path) -> None:
    run_ranks(two_ranks, args=(str(tmp_path),))
    assert written(tmp_path, 1) == {"of_rank_0": 1.0, "both": 0.0}


def test_memory_for_metrics_is_bounded(caplog: Any) -> None:
    logged = LoggedMetrics()
    for step in range(10_000):
        logged.add(step, {"loss": 1.0})
        if step % 2:
            logged.begin_save(step)  # of which every other one fails
        if step % 4 == 1:
            logged.committed(Manifest(step, 1, step, {}), {step - 4, step - 8})
    held = (logged._recent, logged._saved, logged._manifests)
    assert [len(each) for each in held] == [63, 19, 3]
    with caplog.at_level(logging.WARNING):
        logged.add(10_001, {f"metric {i}": 0.0 for i in range(1000)} | {"\ud800": 0.0, "x" * 1000: 0.0})
    assert (len(logged.of_step(10_001)), len(caplog.records)) == (256, 1)
