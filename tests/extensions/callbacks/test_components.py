"""The built-in components of on_commit do with a real checkpoint, and real packages, what they promise."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.config.instantiate import targets
from stagereg.errors import ConfigError, InstallationError, TargetNotAllowedError

COMMAND = "stagereg.extensions.callbacks.shell_command.ShellCommand"


def needs(package: str) -> Any:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed (make frameworks has it)")


def save(root: Path, component: Any, state: Callable[[int], dict[str, Any]] = lambda step: {"x": step}) -> Checkpointer:
    with Checkpointer(str(root), keep=9, on_commit={"it": component}) as checkpointer:
        for step in (1, 2):
            stagereg.log(step, held_out=0.5 / step, nan=math.nan)
            checkpointer.save(step, state(step))
    return checkpointer


def test_a_command_gets_step_path_and_metrics(tmp_path: Path) -> None:
    text = f'echo "$STAGEREG_STEP $STAGEREG_CHECKPOINT $STAGEREG_METRICS" >> {tmp_path}/seen'
    stats = save(tmp_path / "c", stagereg.build("on_commit", "command", command=text)).stats
    assert (stats.on_commit_calls, stats.on_commit_failures) == (2, 0)
    assert (tmp_path / "seen").read_text().splitlines() == [
        f'{step} {tmp_path}/c/step-{step:08} {{"held_out": {0.5 / step}, "nan": "nan"}}' for step in (1, 2)
    ]


def test_a_command_that_fails_or_hangs_is_reported(tmp_path: Path, caplog: Any) -> None:
    save(tmp_path / "a", stagereg.build("on_commit", "command", command="exit 3"))
    assert caplog.text.count("CheckpointError: 'exit 3' exited with code 3") == 2
    limit = datetime.timedelta(seconds=0.5)
    hangs = f"sleep 100 & echo $! >> {tmp_path}/pids; wait"
    save(tmp_path / "b", stagereg.build("on_commit", "command", command=hangs, timeout=limit))
    assert caplog.text.count("was killed: it took longer than 0.5 s (timeout)") == 2
    for pid in (tmp_path / "pids").read_text().split():
        assert not os.path.exists(f"/proc/{pid}") or "\tZ" in Path(f"/proc/{pid}/status").read_text().replace(" ", "\t")


NODE = {"_target_": COMMAND, "command": "touch HERE"}


@pytest.mark.parametrize(
    "on_commit",
    [NODE, [NODE], {"mine": NODE}, {"mine": {**NODE, "_partial_": True}}, {"mine": {"a": {"b": NODE}}}],
    ids=["one", "list", "mapping", "partial", "nested"],
)
def test_a_config_names_a_command_only_where_it_is_allowed(tmp_path: Path, on_commit: Any) -> None:
    target = "stagereg.assembly.Checkpointer"
    config = OmegaConf.create({"_target_": target, "dir": str(tmp_path), "on_commit": on_commit})
    plain = OmegaConf.create({"_target_": target, "dir": str(tmp_path)})
    for refused in (
        lambda: stagereg.instantiate(config),
        lambda: stagereg.instantiate(plain, on_commit=OmegaConf.create({"x": on_commit})),
        lambda: stagereg.instantiate(NODE),
        lambda: stagereg.instantiate({"command": "x"}, _target_=COMMAND),
    ):
        with pytest.raises(TargetNotAllowedError, match=r"on_commit/command.* allow=\[") as raised:
            refused()
        assert str(raised.value).count("\n") == 0
    assert COMMAND not in targets()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("allow", ["on_commit/command", COMMAND])
def test_what_the_program_allows_by_name_is_built(tmp_path: Path, allow: str) -> None:
    config = {"_target_": "stagereg.assembly.Checkpointer", "dir": str(tmp_path / "c")}
    node = {"_target_": COMMAND, "command": f"touch {tmp_path}/here"}
    with stagereg.instantiate({**config, "on_commit": {"x": node}}, allow=[allow]) as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert (tmp_path / "here").exists()
    with pytest.raises(stagereg.StageregError, match="Did you mean 'command'"):
        stagereg.instantiate(config, allow=["on_commit/comand"])


@needs("wandb")
def test_wandb_logs_an_artifact_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    logged: list[Any] = []
    component = stagereg.build("on_commit", "wandb", name="mine")
    save(tmp_path / "none", component)
    assert caplog.text.count("no wandb run is active") == 2
    with wandb.init(dir=tmp_path, project="p") as run:
        real = type(run).log_artifact
        monkeypatch.setattr(type(run), "log_artifact", lambda *a, **k: logged.append((a, k)) or real(*a, **k))
        stats = save(tmp_path / "c", component).stats
    assert (stats.on_commit_calls, stats.on_commit_failures) == (2, 0)
    for step, ((_, artifact), more) in enumerate(logged, 1):
        refs = {entry.ref for entry in artifact.manifest.entries.values()}
        assert refs == {f"file://{path}" for path in (tmp_path / "c" / f"step-{step:08}").iterdir()}
        assert artifact.metadata["held_out"] == 0.5 / step
        assert more["aliases"] == ["latest", f"step-{step}"]
    (file,) = tmp_path.rglob("run-*.wandb")  # what `wandb sync` sends: messages that are not compressed
    expected = {b"mine", b"step-1", b"step-2", b"held_out", f"{tmp_path}/c/step-00000002/manifest.json".encode()}
    until = time.monotonic() + 30  # wandb's own process writes the last of them after the end of the run
    while expected and time.monotonic() < until:
        time.sleep(0.05)
        expected = {each for each in expected if each not in file.read_bytes()}
    assert not expected


@needs("mlflow")
@pytest.mark.parametrize("upload", [False, True])
def test_mlflow_logs_where_the_checkpoint_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upload: bool) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        stats = save(tmp_path / "c", stagereg.build("on_commit", "mlflow", upload=upload)).stats
    assert (stats.on_commit_calls, stats.on_commit_failures) == (2, 0)
    found = tmp_path / "mlruns" / run.info.experiment_id / run.info.run_id / "artifacts" / "checkpoints"
    about = json.loads((found / "step-00000002.json").read_text())
    assert about["path"] == f"{tmp_path}/c/step-00000002"
    assert about["metrics"] == {"held_out": 0.25, "nan": "nan"}
    assert (found / "step-00000001" / "manifest.json").exists() == upload


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_package_that_is_missing_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InstallationError, match=rf"pip install '\./stagereg\[{package}\]'"):
        stagereg.build("on_commit", name)


@pytest.mark.parametrize("given", ["", "  ", 3])
def test_a_command_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="must be a string with a command"):
        stagereg.build("on_commit", "command", command=given)
