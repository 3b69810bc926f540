"""A checkpoint has the values that were logged for its step before the save; a later value is warned of."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.assembly import Checkpointer, Preemption
from stagereg.base import record
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import open_store
from stagereg.extensions.retention.logged_metrics import LoggedMetrics
from stagereg.testing.ranks import run_ranks

from ...support.watching import watching


def written(root: Path, step: int) -> dict[str, Any]:
    manifest = json.loads((root / f"step-{step:08}" / "manifest.json").read_text())
    return manifest.get("metrics", {})


def test_values_logged_before_the_save_are_in_the_manifest(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every=2) as checkpointer:
        for step in range(1, 5):
            stagereg.log(step, loss=9.0)
            stagereg.log(step, loss=1 / step, inf=float("-inf"))
            checkpointer.maybe_save(step, {"x": step})
    assert written(tmp_path, 4) == {"loss": 0.25, "inf": "-inf"}


@pytest.mark.parametrize("point", ["written", "committed"])
def test_a_value_logged_after_the_save_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    """Whether the commit is done or not: otherwise the metrics of a checkpoint would depend on the speed of a disk."""
    monkeypatch.setattr(record, "_listeners", weakref.WeakSet())  # without checkpointers that other tests left open
    reached, go_on = threading.Event(), threading.Event()

    def hold(at: str) -> None:
        if at == point:
            reached.set()
            go_on.wait(30)

    with watching(hold), Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        stagereg.log(1, loss=0.5)
        checkpointer.save(1, {"x": 1})
        assert reached.wait(30)
        stagereg.log(1, held_out=2.5)
        stagereg.log(1, held_out=2.5)
        stagereg.log(1, loss=0.5)  # the checkpoint has this value
        stagereg.log(2, held_out=3.5)
        go_on.set()
        checkpointer.save(2, {"x": 2})
    assert (written(tmp_path, 1), written(tmp_path, 2)) == ({"loss": 0.5}, {"held_out": 3.5})
    [warned] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "held_out of step 1 was logged after that step was saved" in warned
    assert "Call stagereg.log before maybe_save" in warned


def test_a_step_that_is_saved_again_has_what_was_logged_meanwhile(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"x": 1})
        stagereg.log(1, held_out=2.5)
        checkpointer.save(1, {"x": 1})
    assert written(tmp_path, 1) == {"held_out": 2.5}


def test_going_back_forgets_what_was_logged_on_the_way(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        checkpointer.save(1, {"x": 1})
        stagereg.log(2, loss=9.0)
        checkpointer.restore({"x": 0})
        checkpointer.save(2, {"x": 2})
    assert written(tmp_path, 2) == {}


def two_ranks(rank: int, world_size: int, root: str) -> None:
    with Checkpointer(root, preemption=Preemption(grace_period=None)) as checkpointer:
        stagereg.log(1, **{f"of_rank_{rank}": 1.0, "both": float(rank)})
        checkpointer.save(1, {"x": 1})


def test_metrics_are_those_of_rank_0(tmp_path: Path) -> None:
    run_ranks(two_ranks, args=(str(tmp_path),))
    assert written(tmp_path, 1) == {"of_rank_0": 1.0, "both": 0.0}


def test_memory_for_metrics_is_bounded(caplog: Any, tmp_path: Path) -> None:
    logged = LoggedMetrics()
    target = StoreTarget(open_store(str(tmp_path)), Keep(), DcpStorage(), RankGroup(), "0123456789ab")
    for step in range(10_000):
        logged.add(step, {"loss": 1.0})
        logged.begin_save(step, None, [target])
    assert [len(each) for each in (logged._logged, logged._saved)] == [64, 64]
    assert 9_999 in logged._logged
    with caplog.at_level(logging.WARNING):
        logged.add(10_001, {f"metric {i}": 0.0 for i in range(1000)} | {"\ud800": 0.0, "x" * 1000: 0.0})
    assert (len(logged.manifest_fields(10_001)["metrics"]), len(caplog.records)) == (256, 1)
    for i in range(1000):
        logged.add(9_999 - i % 8, {f"late {i}": 0.0})
    assert len(logged._late) == 256
