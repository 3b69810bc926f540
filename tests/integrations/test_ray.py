"""stagereg below Ray Train: one Ray with two workers a job; what fails there is started again by Ray itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="make frameworks installs it")


from omegaconf import OmegaConf
from ray.train import CheckpointConfig

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import ConfigError
from stagereg.integrations import ray as adapter

from ..support.pages import Page
from ..support.programs import comes_true

PROGRAM = Path(__file__).with_name("ray_job.py")
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1"}
"""No statistics are sent; workers are no nicer than others, as a test machine is busy."""
STEPS = 20

pytestmark = pytest.mark.timeout(900)


def start(folder: Path, *arguments: str, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *arguments]
    env = {**os.environ, **RAY, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A sweep of jobs that fail once each, and one that does not; Ray is started once for all."""
    folder = tmp_path_factory.mktemp("ray")
    memory = tempfile.mkdtemp(prefix="stagereg-test-ray-", dir="/dev/shm")
    jobs = (
        "-m",
        f"hydra.sweep.dir={folder}/sweep",
        "fails='',5:1:SIGTERM,5:1:error,described:0:SIGKILL,5:1:SIGSTOP",
        "restarts=1",
    )
    tier = "tier=memory", f"tier.dir={memory}", "tier.every=1", "tier.copies=0"
    done = start(folder, *jobs, *tier)
    yield SimpleNamespace(folder=folder / "sweep", done=done, text=done.stdout + done.stderr)
    shutil.rmtree(memory)


def notes(sweep: Any, job: int, rank: int) -> list[str]:
    return (sweep.folder / str(job) / f"rank-{rank}.txt").read_text().splitlines()


def value(sweep: Any, job: int) -> float:
    return json.loads((sweep.folder / str(job) / "result.json").read_text())["returned"]


@pytest.mark.parametrize("job", [1, 2, 3, 4], ids=["SIGTERM", "error", "SIGKILL in a save", "frozen"])
def test_what_has_failed_goes_on_where_it_was_and_comes_to_the_same_numbers(sweep: Any, job: int) -> None:
    for rank in (0, 1):
        first, second, last = notes(sweep, job, rank)
        assert first.startswith("begins at 0 on ")
        assert last == "ends"
        assert 0 < int(second.split()[2]) < STEPS
    assert value(sweep, job) == value(sweep, 0)


def test_ray_is_told_of_the_checkpoint_where_it_is(sweep: Any) -> None:
    for job in range(5):
        newest = open_store(str(sweep.folder / str(job) / "checkpoints")).latest()
        assert newest is not None
        assert newest.manifest.step == STEPS
        assert f"RESULT {value(sweep, job)!r} {newest.path} " in sweep.done.stdout
        files = [path.name for path in (sweep.folder / str(job)).rglob("__0_0.distcp")]
        assert len(files) <= 2  # those that are kept, and no copy


def test_a_sweep_ends_in_the_report(sweep: Any) -> None:
    assert sweep.done.returncode == 0, sweep.text[-5000:]
    assert "Report: " in sweep.done.stdout
    assert (sweep.folder / "report.html").exists()


def test_an_error_is_told_once_with_its_rank(sweep: Any) -> None:
    # What Ray says when it starts a job again; the error itself is in the worker's log before, too.
    parts = [part for part in sweep.text.split("[FailurePolicy]")[1:] if "ValueError: bad sample 7" in part]
    assert set(re.findall(r"\[Rank (\d) Error Snippet\]", parts[-1])) == {"1"}


def listed(run: Path) -> list[str]:
    """The checkpoints that Ray has of a run, in order."""
    known = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    return [each["checkpoint_dir_name"].rpartition("/")[2] for each in known["checkpoint_results"]]


def test_ray_knows_at_each_start_what_there_is_and_a_second_fit_goes_on(tmp_path: Path) -> None:
    """What Ray's tests of persistence want of its reports: three workers, two failures, the run restored by hand."""
    run = tmp_path / "run"
    command = f"hydra.run.dir={run}", "nproc=3", "checkpoint.keep=99", "restarts=2", "fails=5:1:error+11:2:error"
    assert start(tmp_path, *command).returncode == 0
    after = listed(run)
    done = start(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-5000:]
    assert listed(run) == after == sorted(after)
    assert after[-1] == f"step-{STEPS:08}"
    assert all((run / "checkpoints" / name).is_dir() for name in after)
    for rank in range(3):
        begun = [line.split() for line in (run / f"rank-{rank}.txt").read_text().splitlines() if line != "ends"]
        assert [int(words[2]) for words in begun] == [0, 4, 10, STEPS]
        known = [words[words.index("with") + 1 :] for words in begun]
        assert known[0] == []
        assert all(now == after[: len(now)] and len(now) >= len(before) for before, now in pairwise(known))
        assert known[-1] == after
    assert f"{run}/checkpoints/step-{STEPS:08}" in done.stdout


def test_the_same_command_goes_on_after_the_driver_and_its_ray_are_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(PROGRAM), f"hydra.run.dir={run}", "seconds=0.5"]
    env = {**os.environ, **RAY, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        assert comes_true((run / "checkpoints" / "latest").exists, 200), (tmp_path / "log").read_text()
    finally:
        driver.kill()
        driver.wait(60)
    done = start(tmp_path, f"hydra.run.dir={run}")
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in (0, 1):
        first, second, last = (run / f"rank-{rank}.txt").read_text().splitlines()
        assert (first.split()[2], last) == ("0", "ends")
        assert int(second.split()[2]) >= 2


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(Page("integrations/ray.md").of("python")[0])
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("defaults: [stagereg, _self_]\nnproc: 1\nsteps: 20\n")
    done = start(tmp_path, "hydra.run.dir=out", program=tmp_path / "train.py")
    assert done.returncode == 0, done.stderr[-5000:]
    listed = json.loads((tmp_path / "out" / "checkpoint_manager_snapshot.json").read_text())
    assert listed["latest_checkpoint_result"]["checkpoint_dir_name"] == "checkpoints/step-00000020"


def test_outside_of_hydra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (adapter.run_config, lambda: adapter.on_ranks(print, {})):
        with pytest.raises(ConfigError, match=r"hydra\.main"):
            call()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of Hydra's job."""
    config = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / "out")))
    monkeypatch.setattr(adapter.HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(adapter.HydraConfig, "get", lambda: config)
    return tmp_path / "out"


def test_ray_deletes_no_checkpoint(job: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep"):
        adapter.run_config(checkpoint_config=CheckpointConfig(num_to_keep=2))


def test_the_directory_is_the_one_of_the_job(job: Path) -> None:
    config = adapter.run_config()
    assert Path(config.storage_path, config.name) == job


def test_what_keep_has_deleted_leaves_rays_list_before_the_next_start(job: Path) -> None:
    listed = [{"checkpoint_dir_name": f"checkpoints/step-{step}", "metrics": {}} for step in (1, 2, 3)]
    job.mkdir()
    snapshot = job / "checkpoint_manager_snapshot.json"
    snapshot.write_text(
        json.dumps(
            {
                "checkpoint_results": listed,
                "checkpoint_report_indices": [4, 5, 6],
                "latest_checkpoint_result": listed[-1],
            }
        )
    )
    (job / "checkpoints" / "step-2").mkdir(parents=True)
    adapter.run_config()
    assert json.loads(snapshot.read_text()) == {
        "checkpoint_results": [listed[1]],
        "checkpoint_report_indices": [5],
        "latest_checkpoint_result": listed[1],
    }


def test_resume_holds_until_the_run_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"checkpoint": {"dir": str(tmp_path), "resume": "never"}})
    for step in (1, 2):
        before = adapter._newest(cfg)
        adapter._go_on(cfg, before)
        assert cfg.checkpoint.resume == "never"
        with Checkpointer(str(tmp_path), resume="never") as checkpointer:
            checkpointer.save(step, {"x": step})
    adapter._go_on(cfg, before)
    assert cfg.checkpoint.resume == "auto"
