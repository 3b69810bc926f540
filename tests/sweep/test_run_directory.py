"""A directory is recognised as a run or a sweep; for any other, the error names the one that was probably meant."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagereg.errors import ConfigError
from stagereg.sweep.run_directory import is_run, is_sweep, kind_of

from .samples import sweep, write_hydra, write_run

RUN = "outputs/2026-11-21/10-00-00"
LATER = "outputs/2026-11-21/11-00-00"
SWEEP = "multirun/2026-11-21/12-00-00"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and sweeps as Hydra leaves them, and directories that a user might name by mistake."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate((LATER, RUN)):
        write_hydra(write_run(tmp_path / name), ["lr=1"])
        os.utime(tmp_path / name, (2e9 - age, 2e9 - age))
    sweep(tmp_path / SWEEP, {"stager=blocking": 30.0}, repeats=1, again=False, failing="", unfinished="")
    (tmp_path / RUN / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "other" / "conf").mkdir(parents=True)
    write_run(tmp_path / "trials" / "0")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kind"), [(RUN, "run"), (SWEEP, "sweep"), (f"{SWEEP}/0", "run"), ("trials", "sweep")]
)
def test_runs_and_sweeps_are_recognised(given: str, kind: str, here: Path) -> None:
    assert kind_of(Path(given)) == kind


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (f"{RUN}/checkpoints/step-00000010", f"Name that:\n  stagereg report {RUN}  # a run"),
        (f"{RUN}/metrics.jsonl", f"Name that:\n  stagereg report {RUN}  # a run"),
        (f"{SWEEP}/multirun.yaml", f"Name that:\n  stagereg report {SWEEP}  # a sweep"),
        ("multirun", f"has 1 below. The newest:\n  stagereg report {SWEEP}  # a sweep"),
        ("outputs", f"2 below. The newest:\n  stagereg report {LATER}  # a run\n  stagereg report {RUN}  # a run"),
        ("other", "has none below: a run has metrics.jsonl, result.json or .hydra/overrides.yaml in it"),
        ("outptus/x", "There is no directory outptus/x. Did you mean 'outputs'?"),
    ],
)
def test_any_other_directory_is_an_error_that_names_those_nearby(given: str, seen: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(seen)):
        kind_of(Path(given))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["step-1", "0", "a", ".hydra", "multirun.yaml", "result.json", "latest"]), max_size=5))
def test_any_directory_gets_an_answer(tmp_path: Path, names: list[str]) -> None:
    tmp_path.joinpath(*names).mkdir(parents=True, exist_ok=True)
    if is_run(tmp_path) or is_sweep(tmp_path):
        assert kind_of(tmp_path) in ("run", "sweep")
        return
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        kind_of(tmp_path)
