"""Sweeps with other launchers: the table is the same as with Hydra's own."""

from __future__ import annotations

import pytest

from .programs import App

LAUNCHERS = {
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1"),
    "submitit": ("hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joblib", pytest.param("submitit", marks=pytest.mark.slow)])
def test_a_launcher_elsewhere_changes_nothing_of_the_end(name: str, app: App) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher")
    ended = app.sweep(*LAUNCHERS[name], "a=fine,raise,exit", "b=2")
    assert ended.returncode == 1
    jobs = app.results()
    assert [job["status"] for job in jobs] == ["completed", "failed", "failed"], ended.stdout + ended.stderr
    assert jobs[2]["error"] == "called sys.exit(3)"
    assert jobs[0]["command"].endswith("app.py a=fine b=2")
    assert "Nothing to compare: " in ended.stdout
    kept = (app.folder / "out" / "0" / "result.json").read_bytes()
    again = app.sweep(*LAUNCHERS[name], "a=new,fine,raise", "b=2")
    assert again.returncode == 1
    numbers = {job["overrides"][0]: job["job"]["num"] for job in app.results()}
    assert numbers == {"a=fine": 0, "a=raise": 1, "a=exit": 2, "a=new": 3}, again.stdout + again.stderr
    assert (app.folder / "out" / "0" / "result.json").read_bytes() == kept
    assert "Not compared: 1 job of earlier sweeps in " in again.stdout
    logs = "".join(file.read_text() for file in (app.folder / "out").rglob("*.log")) + again.stdout
    assert "Job 2 of 3." in logs
