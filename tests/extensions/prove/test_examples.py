"""Checkpoints of the examples and of the tutorial's program are proven, on the same and on another number of ranks."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import stagereg

from ...support.app import App
from ...support.pages import Page
from ...support.programs import run
from ...support.wheels import build

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ["model.width=16", "model.layers=1", "model.heads=2", "data.context=64", "data.files=4", "train.eval_every=4"]
STEPS = ["train.steps=20", "checkpoint.every=8", "prove.steps=3", "checkpoint.dir=kept", "hydra.run.dir=out"]
UNEVEN = ["data=uneven", "train.steps=24"]
VARIANTS = {
    "DDP": [],
    "ZeRO": ["parallel=zero"],
    "FSDP2": ["parallel=fsdp2"],
    "uneven DDP": UNEVEN,
    "uneven FSDP2": ["parallel=fsdp2", *UNEVEN],
}


def prove(where: str, folder: Path, command: list[str], *options: str, **variables: str) -> list[tuple[str, str]]:
    """Return each verdict with its reason."""
    start = [sys.executable, "-m", "stagereg", "prove", where, "--json", *options, "--"]
    done = run([*start, *command], folder, OMP_NUM_THREADS="1", **variables)
    assert done.stdout, done.stderr
    return [(each["verdict"], each["why"]) for each in json.loads(done.stdout)["checkpoints"]]


def train(folder: Path, command: list[str], **variables: str) -> None:
    done = run(command, folder, OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_example_is_proven(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train.py"), *SMALL, *STEPS, *VARIANTS[name]]
    train(tmp_path, command)
    before = sorted(tmp_path.rglob("*"))
    assert prove("kept", tmp_path, command) == [("proven", "")]
    if "uneven" in name:  # each rank has files of its own
        ((verdict, why),) = prove("kept", tmp_path, command, "--nproc=1")
        assert verdict == "not tried"
        assert "the sampler was saved with length=" in why
    else:
        assert prove("kept", tmp_path, command, "--nproc=1") == [("proven", "")]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("fewer", [0, 6])
def test_the_program_of_the_tutorial_is_proven(fewer: int, tmp_path: Path) -> None:
    for text in Page("tutorial.md").of("python")[:1] + Page("tutorial.md").of("yaml")[:1]:
        name = re.match(r"# ([\w/.]+)\n", text)
        assert name is not None
        App(tmp_path, {name[1]: text})
    command = [sys.executable, "train.py", *STEPS, f"train.fewer={fewer}"]
    train(tmp_path, command)
    assert prove("kept/step-00000016", tmp_path, command) == [("proven", "")]


@pytest.mark.slow
def test_the_app_with_a_plugin_is_proven(tmp_path: Path) -> None:
    zipfile.ZipFile(build("wheel", tmp_path, EXAMPLES / "plugin")).extractall(tmp_path / "site")
    script = str(EXAMPLES / "plugin" / "app" / "finetune.py")
    command = [sys.executable, script, *STEPS, "width=32", "train.uneven=2", "export.every=3"]
    train(tmp_path, command, PYTHONPATH=str(tmp_path / "site"))
    found = prove("kept/step-00000016", tmp_path, command, PYTHONPATH=str(tmp_path / "site"))
    assert found == [("proven", "")]


def test_a_step_of_a_trainer_ends_at_the_forward_after_an_optimizer_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = stagereg.Checkpointer(str(tmp_path), prove=stagereg.Prove(steps=2), save_last=False)
    checkpointer.observer.ends_at_forward = True
    for step in range(1, 5):
        for _ in range(3):  # gradients of three batches are accumulated
            model(torch.ones(5, 2)).sum().backward()
        optimizer.step()
        if step == 1:
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    checkpointer.close()
    rows: list[Any] = json.loads((tmp_path / "proofs" / "step-00000001.rank0.json").read_text())["rows"][2:]
    assert [(row["step: optimizer steps"], row["data: count"]) for row in rows] == [(1, 15), (1, 15)]
