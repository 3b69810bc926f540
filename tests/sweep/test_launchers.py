"""Sweeps with other launchers and sweepers: the table is the same as with Hydra's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import programs
from .programs import App

JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
SUBMITIT = ("hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1")
OPTUNA = ("hydra/sweeper=stagereg_optuna", "hydra.sweeper.n_trials=3")


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, programs.PLAIN, programs.PLAIN_CONFIG)


@pytest.fixture
def ranks(tmp_path: Path) -> App:
    return App(tmp_path, programs.RANKS, programs.RANKS_CONFIG)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("hydra_plugins.hydra_joblib_launcher", *JOBLIB), id="joblib"),
        pytest.param(("hydra_plugins.hydra_submitit_launcher", *SUBMITIT), id="submitit", marks=pytest.mark.slow),
    ],
)
def test_a_launcher_elsewhere_changes_nothing_of_the_end(launcher: tuple[str, ...], app: App) -> None:
    needs(launcher[0])
    ended = app.sweep(*launcher[1:], "a=fine,raise,exit", "b=2")
    assert ended.returncode == 1
    jobs = app.results()
    assert [job["status"] for job in jobs] == ["completed", "failed", "failed"], ended.stdout + ended.stderr
    assert jobs[2]["error"] == "left by sys.exit(3)"
    assert jobs[0]["command"].endswith("app.py a=fine b=2")
    assert "Best by returned.score: a=fine" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("hydra_plugins.hydra_joblib_launcher", *JOBLIB), id="joblib"),
        pytest.param(("hydra_plugins.hydra_submitit_launcher", *SUBMITIT), id="submitit"),
    ],
)
def test_ranks_start_below_a_launchers_worker(launcher: tuple[str, ...], ranks: App) -> None:
    needs(launcher[0])
    ended = ranks.sweep(*launcher[1:], "stager=overlapped", "sweep.repeats=2", limit_s=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jobs = ranks.results()
    assert [(job["repeat"], job["again"]) for job in jobs] == [(0, False), (0, True), (1, False)]
    assert all(job["figures"]["stall_ms"] > 0 for job in jobs)
    assert "Best by stall_ms: " in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_search_minimises_the_stall_of_ranks(ranks: App) -> None:
    needs("optuna")
    ended = ranks.sweep(*OPTUNA, "stager=blocking,overlapped,shared", limit_s=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stalls = {job["overrides"][-1]: job["figures"]["stall_ms"] for job in ranks.results()}
    assert sorted(stalls) == ["stager=blocking", "stager=overlapped", "stager=shared"]
    assert f"Best by stall_ms: {min(stalls, key=stalls.__getitem__)}" in ended.stdout
