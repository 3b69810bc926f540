"""Runs with a rule of what is retained, the steps that stay, and a rule that tests register."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

import stagereg
from stagereg import cli
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.open_store import open_store


def composed(folder: Path, *overrides: str, app: str = "defaults: [stagereg, _self_]") -> Any:
    (folder / "app.yaml").write_text(app)
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("app", overrides=[f"checkpoint.dir={folder / 'run'}", *overrides])


def train(dir: str, keep: Any, steps: Iterable[int], metrics: Mapping[int, float] = {}, on_commit: Any = None) -> None:
    with Checkpointer(dir, every=1, keep=keep, on_commit=on_commit, save_last=False) as checkpointer:
        checkpointer.restore({"x": torch.zeros(64)})
        for step in steps:
            if step in metrics:
                stagereg.log(step, loss=metrics[step])
            checkpointer.save(step, {"x": torch.full((64,), float(step))})
            checkpointer.wait()


def steps(dir: str | Path) -> list[int]:
    return sorted(one.manifest.step for one in open_store(str(dir)).checkpoints()[0])


def listed(dir: str, capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    assert cli.main(["ls", dir, "--json"]) == 0
    return {each["step"]: each["kept"] for each in json.loads(capsys.readouterr().out)["checkpoints"]}


@stagereg.register("keep", "of_steps")
class OfSteps:
    """Keeps those of some steps. It has a parameter that the usual policy has as well, and attributes of any kind."""

    def __init__(self, steps: list[int], every: int | None = 7) -> None:
        self.steps, self.every, self.lock = steps, every, threading.Lock()

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        return {one.path: "of a step" for one in checkpoints if one.manifest.step in self.steps}
