"""``hydra/callbacks=compare``: the files that jobs leave, and which errors stop a sweep."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import stagereg.base.record as record
from stagereg.errors import LaunchError
from stagereg.launch.scheduler_task import SchedulerTask
from stagereg.sweep.callback import Compare
from stagereg.sweep.plan import Plan
from stagereg.sweep.result import JobResult
from stagereg.sweep.reuse import held

from ..support.samples import BEGAN, Sample, write_events, write_hydra, write_run
from . import programs
from .programs import App

HYDRA_1_4 = Path(sys.prefix) / "hydra-1.4" / "bin" / "python"
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[App, subprocess.CompletedProcess[str]]:
    """A sweep of jobs that go well, raise, leave by sys.exit, and return something else."""
    app = App(tmp_path_factory.mktemp("mixed"), programs.PLAIN, programs.PLAIN_CONFIG)
    return app, app.sweep("a=raise,exit,fine,other", "b=2,1")


def test_jobs_that_fail_are_rows_and_do_not_stop_the_others(mixed: Any) -> None:
    app, ended = mixed
    jobs = app.results()
    assert [job["overrides"][0] for job in jobs] == [f"a={a}" for a in ("raise", "exit", "fine", "other") for _ in "12"]
    assert [job["status"] for job in jobs] == ["failed"] * 4 + ["completed"] * 4
    assert jobs[0]["error"].splitlines()[0] == "KeyError: 'no cheese <b>today</b>'"
    assert "Traceback" in jobs[0]["error"]
    assert (jobs[2]["error"], jobs[4]["error"]) == ("called sys.exit(3)", None)
    assert ended.returncode == 1
    assert "Not decided: b=1 leads with 1." in ended.stdout, ended.stdout + ended.stderr
    out = app.folder / "out"
    assert f"Report: {out / 'report.html'}" in ended.stdout
    with (out / "compare.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    assert jobs[6]["figures"]["returned.tokens"] == 5
    assert ended.stdout.count("because it has no returned.score. Available metrics: returned.tokens.") == 2


@pytest.mark.slow
def test_a_result_has_the_job_its_machine_and_its_command(mixed: Any) -> None:
    app, _ = mixed
    job = app.results()[4]
    assert job["overrides"] == ["a=fine", "b=2"]
    assert (job["job"]["num"], job["job"]["name"]) == (4, "app")
    assert job["figures"] == {"loss": 0.5, "returned.score": 2.0}
    assert job["returned"] == {"loss": 0.5, "score": 2}
    assert set(job["versions"]) == {"stagereg", "torch", "hydra-core", "python"}
    assert job["environment"]["cores"] >= 1
    assert shlex.split(job["command"]) == [sys.executable, "-W", "ignore", "app.py", "a=fine", "b=2"]
    alone = subprocess.run(
        f"{job['command']} hydra.run.dir=alone", shell=True, cwd=app.folder, env=programs.environment(), timeout=60
    )
    assert alone.returncode == 0
    again = json.loads((app.folder / "alone" / "result.json").read_text())
    assert again["job"]["num"] is None
    kept = ("status", "overrides", "returned", "figures", "command")
    assert {key: again[key] for key in kept} == {key: job[key] for key in kept}


@pytest.mark.slow
@pytest.mark.skipif(not HYDRA_1_4.exists(), reason=f"Hydra 1.4 is not installed beside: no {HYDRA_1_4}")
def test_a_sweep_ends_in_its_table_on_hydra_1_4(app: App) -> None:
    ended = app.sweep("a=fine,exit", "sweep.repeats=2", python=HYDRA_1_4)
    assert ended.returncode == 1
    assert "Nothing to compare: " in ended.stdout, ended.stdout + ended.stderr
    assert [job["status"] for job in app.results()] == ["completed", "failed", "completed", "failed", "completed"]
    assert app.results()[0]["versions"]["hydra-core"].startswith("1.4.")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_die_raise_or_leave_are_rows(tmp_path: Path) -> None:
    app = App(tmp_path, programs.RANKS, programs.RANKS_CONFIG)
    ended = app.sweep("a=killed,raise,exit,fine", limit_s=220)
    assert ended.returncode == 1
    jobs = app.results()
    assert [job["status"] for job in jobs] == ["failed", "failed", "failed", "completed"]
    assert jobs[0]["error"].splitlines()[0] == "rank 1: killed by SIGKILL"
    assert jobs[1]["error"].splitlines()[0].endswith(": KeyError: 'no cheese <b>today</b>'")
    assert jobs[2]["error"].splitlines()[0].endswith("called sys.exit(3)")
    assert jobs[3]["figures"]["stall_ms"] > 0
    assert jobs[3]["figures"]["checkpoints"] == 2
    assert "Nothing to compare: " in ended.stdout


# -- the callback alone, without a program


def config(directory: Path, sweeper: dict[str, Any] | None = None, mode: str = "MULTIRUN", **sweep: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "hydra": {
                "mode": RunMode[mode],
                "sweeper": {"_target_": BASIC} | (sweeper or {}),
                "runtime": {"output_dir": str(directory / "0"), "cwd": str(directory)},
                "sweep": {"dir": "."},
                "overrides": {"task": ["a=1"], "hydra": ["hydra/launcher=joblib", "hydra.job.chdir=true"]},
                "job": {"num": 0, "id": "0", "name": "app"},
            },
            "sweep": sweep,
        }
    )


def ended(value: Any, status: JobStatus = JobStatus.COMPLETED) -> JobReturn:
    returned = JobReturn(status=status)
    returned.return_value = value
    return returned


def handed(directory: Path, returned: JobReturn, metric: str | None) -> Any:
    """The value that a sweeper gets for a job with that return value."""
    Compare(metric).on_job_end(config(directory), returned)
    assert returned.status == JobStatus.COMPLETED
    return returned.return_value


def failed() -> JobReturn:
    return ended(KeyError("x"), JobStatus.FAILED)


@pytest.mark.parametrize(
    ("returned", "metric", "value"),
    [
        ({"score": 3, "loss": 0.5}, "returned.score", 3),
        ({"score": 3, "loss": 0.5}, "loss", 0.5),
        (0.25, "loss", 0.25),
        ({"score": 3}, None, {"score": 3}),
        ({"score": 3}, "stall_ms", math.nan),
        (None, "stall_ms", math.nan),
        (math.inf, "loss", math.nan),
    ],
)
def test_a_sweeper_gets_the_number_it_searches_by_or_nan(
    returned: Any, metric: str | None, value: Any, tmp_path: Path
) -> None:
    given = handed(tmp_path, failed() if returned is None else ended(returned), metric)
    assert given == value or (given != given and value != value)
    assert JobResult.read(tmp_path / "0").status == ("failed" if returned is None else "completed")


@pytest.mark.parametrize(
    ("returned", "metric", "warning"),
    [
        (math.nan, "loss", "This job cannot be ranked, because loss is nan"),
        (-math.inf, None, "This job cannot be ranked, because loss is -inf"),
        (
            {"accuracy": 3, "loss": 1},
            "returned.acuracy",
            "This job cannot be ranked, because it has no returned.acuracy. Did you mean 'returned.accuracy'? "
            "Available metrics: loss, returned.accuracy.",
        ),
        (
            {"tokens": 5},
            "returned.score",
            "This job cannot be ranked, because it has no returned.score. Available metrics: returned.tokens.",
        ),
        (1.0, "loss", ""),
        ("text", None, ""),
    ],
)
def test_a_job_that_cannot_be_ranked_is_reported_at_once(
    returned: Any, metric: str | None, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handed(tmp_path, ended(returned), metric)
    assert caplog.messages == ([warning] if warning else [])


def test_a_job_that_fails_leaves_its_result_the_cause_first(tmp_path: Path) -> None:
    returned = failed()
    Compare().on_job_end(config(tmp_path, mode="RUN"), returned)
    assert returned.status == JobStatus.FAILED, "outside of a sweep it is not contained"
    job = JobResult.read(tmp_path / "0")
    assert (job.status, job.error) == ("failed", "KeyError: 'x'")
    trace = "Traceback (most recent call last):\n  File x\nKeyError: 'no'\n"
    error = LaunchError(f"rank 1: {trace}\nThe above was the cause:\n\n{trace.replace('Key', 'Value')}")
    Compare().on_job_end(config(tmp_path), ended(error, JobStatus.FAILED))
    assert JobResult.read(tmp_path / "0").error == f"rank 1: ValueError: 'no'\n{error}"


def test_only_records_of_this_run_give_figures_and_the_device(tmp_path: Path) -> None:
    for began in (BEGAN, record.now()):
        shutil.rmtree(tmp_path / "0", ignore_errors=True)
        write_run(tmp_path / "0", Sample(began=began, versions={"device": "H200"}))
        Compare().on_job_end(config(tmp_path), ended(1.5))
        job = JobResult.read(tmp_path / "0")
        assert (job.figures == {"loss": 1.5}) == (began == BEGAN)
        assert ("stall_ms" in job.figures) == (began != BEGAN)
        assert (job.environment.get("device") == "H200") == (began != BEGAN)


def test_a_completed_result_of_a_sweep_is_never_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as by the job of a scheduler that outlived its sweep, and has ended since the next sweep began."""
    for returned, mode, value in ((1.5, "MULTIRUN", 1.5), (2.5, "MULTIRUN", 1.5), (3.5, "RUN", 3.5)):
        Compare().on_job_end(config(tmp_path, mode=mode), ended(returned))
        assert JobResult.read(tmp_path / "0").returned == value
    assert "Another process completed this job" in caplog.text


def test_of_several_tasks_of_one_run_the_first_has_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, value in ((0, 0.25), (1, None)):
        monkeypatch.setattr(SchedulerTask, "current", lambda index=index: SchedulerTask(index, 2, port=1))
        Compare().on_job_end(config(tmp_path), ended(value))
    assert JobResult.read(tmp_path / "0").returned == 0.25


@pytest.mark.parametrize("broken", ["JobResult.write", "figures", "Run.read", "_versions"])
def test_an_error_of_the_callback_costs_no_job_its_value(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(f"stagereg.sweep.callback.{broken}", fail)
    assert handed(tmp_path, ended(0.5), None) == 0.5
    worst = handed(tmp_path, failed(), None)
    assert worst != worst
    assert "the disk is full" in caplog.text
    assert (tmp_path / "0" / "result.json").exists() == (broken != "JobResult.write")
    if broken in ("figures", "_versions"):  # all else is known
        known = JobResult.read(tmp_path / "0")
        assert bool(known.versions) == (broken == "figures")
        assert "cpu" in known.environment


def test_settings_that_make_a_sweep_useless_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for metric, direction, repeats, line in (
        ("loss", "down", 1, "minimize or maximize, got 'down'"),
        ("shadowed_steps", None, 1, "sweep.direction=minimize"),
        ("loss", None, 3, "sweep.repeats=3 requires hydra/sweeper=interleaved: "),
    ):
        with pytest.raises(SystemExit, match="1"):
            Compare(metric, direction).on_multirun_start(config(tmp_path, repeats=repeats))
        (seen,) = capsys.readouterr().err.splitlines()
        assert seen.startswith("stagereg: ")
        assert line in seen
    Compare("loss", "maximize").on_multirun_start(config(tmp_path, {"repeats": 3}, repeats=3))


def test_another_sweeper_is_refused_where_jobs_are_since_it_would_number_its_own_from_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan(tmp_path, (), "").write()  # its jobs were deleted
    Compare("loss").on_multirun_start(config(tmp_path))
    assert not (tmp_path / "sweep.json").exists()
    (tmp_path / "sweep.json").write_text('{"method": "grid"}')  # of another tool
    with pytest.raises(SystemExit, match="1"):
        Compare("loss").on_multirun_start(config(tmp_path))
    assert "sweep.json: 'format'" in capsys.readouterr().err
    assert (tmp_path / "sweep.json").read_text() == '{"method": "grid"}'
    (tmp_path / "sweep.json").unlink()
    write_hydra(tmp_path / "3", ["a=1"], 3)
    with pytest.raises(SystemExit, match="1"):
        Compare("loss").on_multirun_start(config(tmp_path))
    said = capsys.readouterr().err
    assert f"contains 1 job of an earlier sweep, but {BASIC} numbers its jobs from 0: " in said
    assert said.endswith("Choose another hydra.sweep.dir, delete this directory, or use hydra/sweeper=interleaved.\n")
    Compare("loss").on_multirun_start(config(tmp_path, {"repeats": 1}))
    shutil.rmtree(tmp_path / "3")
    with held(tmp_path / "other"), pytest.raises(SystemExit, match="1"):
        Compare("loss").on_multirun_start(config(tmp_path / "other"))
    assert "is in use by another sweep" in capsys.readouterr().err


def test_a_job_that_resumed_and_recorded_no_step_failed_and_has_no_figures(tmp_path: Path) -> None:
    """By the attempts since the job began: a restart that has no step left to take is no such job."""
    began = record.now()
    start, end = (
        {"event": "start", "rank": 0, "world_size": 1, "format": 1},
        {"event": "end", "status": "completed", "seconds": 1},
    )
    resumed = {"event": "resumed", "step": 20, "dir": str(tmp_path / "0" / "checkpoints")}
    stall = {"event": "stall", "step": 21, "start": began, "seconds": 0.1}
    logged = {"event": "log", "step": 20, "values": {"loss": 1.0}}
    crash = {"event": "end", "status": "failed", "seconds": 1, "error": "x"}
    for events, status, step in (
        ([start, resumed, logged, end], "failed", 20),
        ([start, resumed, stall, end], "completed", 20),
        ([start, resumed, {**logged, "step": 21}, end], "completed", 20),
        ([start, {"event": "step", "step": 1}, resumed, end], "completed", None),
        ([start, end], "completed", None),
        (
            [start, stall, crash, {**start, "run": "a.1"}, {**resumed, "run": "a.1"}, {**end, "run": "a.1"}],
            "completed",
            20,
        ),
    ):
        events = [{"run": "a.0", **each, "t": began + at / 100} for at, each in enumerate(events)]
        shutil.rmtree(tmp_path / "0", ignore_errors=True)
        write_events(tmp_path / "0" / "metrics.jsonl", events)
        callback = Compare()
        callback._began = began
        callback.on_job_end(config(tmp_path), ended(1.5))
        job = JobResult.read(tmp_path / "0")
        assert (job.status, job.resumed, bool(job.figures)) == (status, step, status == "completed"), events
    for checkpoints, named in (
        (tmp_path / "0" / "checkpoints", tmp_path / "0"),
        ("s3://bucket/run", "s3://bucket/run"),
    ):
        shutil.rmtree(tmp_path / "0")
        events = [start, {**resumed, "dir": str(checkpoints)}, end]
        write_events(tmp_path / "0" / "metrics.jsonl", [{**each, "t": began, "run": "a.0"} for each in events])
        callback.on_job_end(config(tmp_path), ended(1.5))
        advice = f"the job resumed from its last step, 20. To run it again, delete {named}."
        assert (JobResult.read(tmp_path / "0").error or "").endswith(advice)


def test_a_sweep_that_cannot_be_compared_shows_how_to_try_again(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="1"):
        Compare("loss").on_multirun_end(config(tmp_path))
    seen = capsys.readouterr().err
    assert "contains no job" in seen
    assert f"Run `stagereg report {tmp_path}` to create the report" in seen


def test_a_sweep_of_which_no_job_has_the_metric_ends_with_1_and_keeps_its_results(tmp_path: Path, capsys: Any) -> None:
    Compare("returned.acuracy", "maximize").on_job_end(config(tmp_path), ended({"accuracy": 0.5}))
    with pytest.raises(SystemExit, match="1"):
        Compare("returned.acuracy", "maximize").on_multirun_end(config(tmp_path))
    seen = capsys.readouterr()
    assert f"No completed job in {tmp_path} has returned.acuracy. Did you mean 'returned.accuracy'?" in seen.err
    assert "Choose another metric with --metric NAME." in seen.err
    assert not (tmp_path / "report.html").exists(), "it would have no answer"
    assert JobResult.read(tmp_path / "0").figures == {"returned.accuracy": 0.5}
    Compare().on_multirun_end(config(tmp_path))
    assert "No answer: no job has stall_ms.\nAvailable metrics: returned.accuracy.\n" in capsys.readouterr().out


def test_the_command_of_a_job_has_nothing_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(tmp_path)
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "-m"])
    made.hydra.overrides.task = ["a='x y'", "sweep.repeats=3", "++sweep.repeat=1", "+sweep.mine=2"]
    Compare().on_job_end(made, ended(1.0))
    arguments = shlex.split(JobResult.read(tmp_path / "0").command)
    assert arguments[-3:] == ["a='x y'", "+sweep.mine=2", "hydra.job.chdir=true"]
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # the config has hydra.mode=MULTIRUN
    (tmp_path / "0" / "result.json").unlink()
    Compare().on_job_end(made, ended(1.0))
    assert JobResult.read(tmp_path / "0").command.endswith(" hydra.job.chdir=true hydra.mode=RUN")
    assert arguments[0] == sys.orig_argv[0]
    assert os.sep not in arguments[0] or Path(arguments[0]).exists()
