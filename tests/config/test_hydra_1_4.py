"""Hydra's release candidate, in a separate environment: configs keep their promises there too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.app import STAGER

TESTS = Path(__file__).parents[1]
# `make test` puts it there: the environment of the tests, but for Hydra and OmegaConf.
PYTHON = Path(sys.prefix) / "hydra-1.4" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"Hydra 1.4 is not installed beside: no {PYTHON}")

APP = f"""
import hydra, hydra.utils
import stagereg
from stagereg.config.instantiate import targets

@stagereg.register("stager", "mine"){STAGER}
@hydra.main(config_path=".", config_name="app", execution_whitelist=tuple(targets()))
def main(cfg):
    print("HYDRA", hydra.__version__)
    print("OURS", vars(stagereg.instantiate(cfg.stager)))
    print("HYDRAS", vars(hydra.utils.instantiate(cfg.stager)))
main()
"""


def on_hydra_1_4(*arguments: str, timeout_s: float, cwd: Path = TESTS.parent) -> subprocess.CompletedProcess[str]:
    # Variables for this interpreter and this test run's workers do not apply to the other environment.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH", "COVERAGE"))}
    command = [str(PYTHON), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_registrys_paths_are_an_allow_list_for_hydra_1_4(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "app.yaml").write_text("defaults: [{stager: mine}, _self_]\n")
    run = ["app.py", "hydra.run.dir=.", "hydra.output_subdir=null"]
    done = on_hydra_1_4(*run, "stager.slots=5", cwd=tmp_path, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["OURS {'slots': 5}", "HYDRAS {'slots': 5}"]
    assert done.stdout.startswith("HYDRA 1.4.")
    assert "whitelist" not in done.stderr

    other = on_hydra_1_4(*run, "stager._target_=os.getcwd", cwd=tmp_path, timeout_s=60)
    assert other.returncode == 1
    assert "stager names the _target_ 'os.getcwd', which is not registered" in other.stderr
    assert "OURS" not in other.stdout


CONFIG = ("config/test_instantiate.py", "config/test_allow_list.py", "config/test_schema.py")
RANKS = ("config/test_suggestions.py", "launch/test_main.py", "config/test_plugins.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [CONFIG, RANKS], ids=["config", "ranks"])
def test_the_same_tests_pass_on_hydra_1_4(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    # Some give Hydra the `version_base` that 1.3 wants, and look at all of stderr: 1.4 warns of it there.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    tests = [str(TESTS / name) for name in names]
    done = on_hydra_1_4("-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *tests, timeout_s=800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
