"""The files of runs and sweeps for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagereg.sweep.tensorboard as tensorboard
from stagereg.errors import ConfigError
from stagereg.sweep.comparison import compare
from stagereg.sweep.result import results
from stagereg.sweep.run import RankRecord, Run

from .samples import BEGAN, Sample, sweep, write_run

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
api = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")


def read(directory: Path) -> Any:
    found = event_accumulator.EventAccumulator(str(directory))
    found.Reload()
    return found


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = read(directory)
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_run_has_its_steps_checkpoints_and_logs_as_scalars(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "run", Sample(ranks=2)))
    tensorboard.write_run(run, tmp_path / "logdir")
    seen = scalars(tmp_path / "logdir")
    assert seen["checkpoint/stall_ms"] == [(step, pytest.approx(2.1, abs=0.01)) for step in (10, 20, 30, 40)]
    assert seen["checkpoint/write_ms"][0] == (10, pytest.approx(20, abs=0.01))
    assert seen["checkpoint/stage_ms"][0] == (10, pytest.approx(5, abs=0.01))
    assert [step for step, _ in seen["train/step_ms"]] == list(range(2, 41))
    assert dict(seen["train/step_ms"])[11] == pytest.approx(11, abs=0.01), "a stall is no part of a step"
    assert seen["train/loss"][-1] == (40, 2.5)
    assert len(seen["log/samples"]) == len(seen["log/loss/rank1"]) == 40
    written = read(tmp_path / "logdir").Scalars("train/loss")[0]
    assert written.wall_time == pytest.approx(run.ranks[0].logs[0][1]), "the time is the run's, not the report's"


def test_numbers_that_are_none_stay_none(tmp_path: Path) -> None:
    rank = RankRecord(0, logs=((1, BEGAN, {"loss": None}), (2, BEGAN, {"loss": 0.5})))
    tensorboard.write_run(Run(tmp_path, (rank,)), tmp_path)
    (_, first), (_, second) = scalars(tmp_path)["train/loss"]
    assert math.isnan(first)
    assert second == 0.5


def test_writing_again_replaces_only_its_own_files(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "run", Sample(ranks=1)))
    logdir = tmp_path / "logdir"
    logdir.mkdir()
    (logdir / "events.out.tfevents.1.theirs").write_bytes(b"")
    for _ in range(2):
        tensorboard.write_run(run, logdir)
    assert len(scalars(logdir)["train/loss"]) == 40
    assert (logdir / "events.out.tfevents.1.theirs").exists()


def hparams(directory: Path) -> tuple[dict[str, Any], list[str], bool]:
    """Parameters, names of the metrics, and whether the job is recorded as ended."""
    found = read(directory)
    plugin = {tag: found.SummaryMetadata(tag).plugin_data.content for tag in found.PluginTagToContent("hparams")}
    start = api.HParamsPluginData.FromString(plugin["_hparams_/session_start_info"]).session_start_info.hparams
    head = api.HParamsPluginData.FromString(plugin["_hparams_/experiment"]).experiment
    given = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.items()}
    return given, [info.name.tag for info in head.metric_infos], "_hparams_/session_end_info" in plugin


def test_a_sweep_has_its_parameters_and_figures_as_hparams(tmp_path: Path) -> None:
    stalls = {"stager=blocking lr=0.1": 30.0, "stager=pinned_cached lr=1e-3": 2.0}
    comparison = compare(results(sweep(tmp_path / "sweep", stalls, repeats=2, runs=True)))
    logdirs = tensorboard.write_sweep(comparison, tmp_path / "logdir")
    assert sorted(logdir.name for logdir in logdirs) == [str(num) for num in range(8)]
    first, names, ended = hparams(tmp_path / "logdir" / "0")
    assert (first["stager"], first["lr"]) == ("blocking", "0.1"), "a text, since a job has none"
    assert (first["repeat"], first["A/A"], ended) == (0, "no", True)
    assert hparams(tmp_path / "logdir" / "4")[0]["A/A"] == "yes"
    failed, same_names, ended = hparams(tmp_path / "logdir" / "5")
    assert not ended, "a job that failed has not ended well"
    assert set(failed) == set(first)
    assert same_names == names, "TensorBoard takes the columns of whichever job it reads first"
    seen = scalars(tmp_path / "logdir" / "1")
    assert seen["figures/stall_ms"] == [(0, pytest.approx(1.95))]
    assert len(seen["train/loss"]) == 40
    assert set(names) >= {"figures/stall_ms", "figures/loss"}


def test_parameters_that_are_numbers_in_all_jobs_are_numbers(tmp_path: Path) -> None:
    numbers = {"lr=0.1": 3.0, "lr=1e-3": 2.0}
    comparison = compare(results(sweep(tmp_path / "a", numbers, repeats=1, others=False)))
    tensorboard.write_sweep(comparison, tmp_path / "b")
    assert [hparams(tmp_path / "b" / job)[0] for job in "01"] == [
        {"lr": lr, "repeat": 0, "A/A": "no"} for lr in (0.1, 0.001)
    ]


def test_without_the_package_or_a_directory_a_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.read(write_run(tmp_path / "run", Sample(ranks=1)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard: cannot write in"):
        tensorboard.write_run(run, tmp_path / "file" / "logdir")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hydra-stagereg\[tensorboard\]'"):
        tensorboard.write_run(replace(run), tmp_path / "logdir")
    assert not (tmp_path / "logdir").exists()
