"""What a run logs decides which checkpoints are the best, and what lacks the metric is named before it goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import stagereg
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.open_store import open_store
from tests.support.keeping import listed, steps, train
from tests.support.places import PLACES, place

LOSSES = {1: 0.9, 2: 0.125, 3: 0.8, 4: 0.25, 5: 0.7, 6: 0.6}


@pytest.fixture(params=PLACES)
def dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, tmp_path)


def test_a_run_keeps_the_union_and_ls_says_why(dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(dir, Keep(newest=1, every=3, best=2, metric="loss"), [1, 2, 3, 4, 5], LOSSES)
    train(dir, Keep(newest=1, every=3, best=2, metric="loss"), [6, 7], LOSSES)
    assert steps(dir) == [2, 3, 4, 6, 7]
    assert listed(dir, capsys) == {
        7: "newest",
        6: "every 3",
        4: "best 2 of 2 by loss=0.25",
        3: "every 3",
        2: "best 1 of 2 by loss=0.125",
    }
    with open_store(dir).readers.read_lease(open_store(dir).checkpoints()[0][-1].path):
        reader = f"best 1 of 2 by loss=0.125; being read by process {os.getpid()} on "
        assert listed(dir, capsys)[2].startswith(reader)
    assert cli.main(["ls", dir]) == 0
    assert "latest; newest" in capsys.readouterr().out
    train(dir, 2, [8, 9])
    assert listed(dir, capsys) == {9: "", 8: ""}


def test_a_program_that_logs_late_is_warned_before_a_checkpoint_goes(
    dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(dir, keep=Keep(newest=1, best=1, metric="loss"), save_last=False) as checkpointer:
        for step, loss in [(1, 0.25), (2, 0.5), (3, 0.75)]:
            checkpointer.save(step, {"x": 1})
            checkpointer.wait()
            stagereg.log(step, loss=loss)
            if step == 1:
                assert "loss of step 1 was logged after that step was saved" in caplog.text
                assert steps(dir) == [1]
    assert steps(dir) == [3]
    assert "a checkpoint without the metric 'loss' is deleted" in caplog.text


def test_a_checkpoint_deleted_without_the_metric_is_named(dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also if others have the metric: the deleted one may have been the best."""
    train(dir, Keep(newest=1, best=2, metric="loss"), range(1, 5), {1: 0.5, 2: 0.25, 4: 0.75})
    assert steps(dir) == [1, 2, 4]
    [warned] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "is deleted in" in warned
    assert ": step-00000003" in warned


def test_no_warning_if_each_checkpoint_has_the_metric(dir: str, caplog: pytest.LogCaptureFixture) -> None:
    train(dir, Keep(newest=1, best=1, metric="loss"), LOSSES, LOSSES)
    assert steps(dir) == [2, 6]
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_metric_that_is_never_logged_is_warned_of_once(dir: str, caplog: pytest.LogCaptureFixture) -> None:
    losses = dict.fromkeys(range(1, 9), 0.5)
    train(dir, Keep(newest=1, every=4, best=3, metric="lost"), range(1, 9), losses)
    assert steps(dir) == [4, 8]
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith(
        f"stagereg: a checkpoint without the metric 'lost' is deleted in {open_store(dir).root}: step-00000001"
    )
    assert warned[0].endswith("before the save: stagereg.log(step, lost=...). Did you mean 'loss'?")


def test_a_rule_gets_what_was_logged(tmp_path: Path) -> None:
    class Least:
        def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
            assert metrics.keys() == {one.path for one in checkpoints}
            return {max(metrics, key=lambda path: metrics[path]["loss"]): "greatest loss"}

    train(str(tmp_path), Least(), range(1, 5), LOSSES)
    assert steps(tmp_path) == [1, 4]
