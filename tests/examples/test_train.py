"""The example, as a user runs it: from its folder and elsewhere, even and uneven, resumed, read by plain torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils import _pytree as pytree

from ..support.app import App

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
SMALL = ["model.width=16", "model.layers=1", "model.heads=2", "data.context=64", "train.eval_every=4"]


def run(*overrides: str, cwd: Path, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    return App(cwd, {}).fork(*SMALL, *overrides, script=str(script), OMP_NUM_THREADS="1")


def saved(checkpoint: Path, tmp_path: Path) -> dict:
    """Load a checkpoint with plain torch."""
    file = tmp_path / f"{checkpoint.parent.name}-{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, file)
    return torch.load(file, weights_only=False)


def differing(a: object, b: object) -> list[str]:
    """Where two checkpoints are not the same."""
    (left, spec), (right, other) = pytree.tree_flatten_with_path(a), pytree.tree_flatten_with_path(b)
    assert spec == other
    pairs = zip(left, right, strict=True)
    return [
        str(path) for (path, x), (_, y) in pairs if not (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y)
    ]


def uneven(done: subprocess.CompletedProcess[str]) -> tuple[int, list[int]]:
    """How many steps a run took, and how many of them the ranks had no data for, by number."""
    assert done.returncode == 0, done.stderr
    steps = re.search(r"^  steps +(\d+) in", done.stdout, re.M)
    shadowed = re.search(r"^  shadowed steps per rank +(.*)", done.stdout, re.M)
    return int(steps[1]), sorted(map(int, shadowed[1].split(", ")))


@pytest.mark.parametrize("ranks", [["nproc=1"], pytest.param([], marks=pytest.mark.slow)], ids=["one rank", "default"])
def test_readme_command_trains_and_plain_torch_loads_it(tmp_path: Path, ranks: list[str]) -> None:
    overrides = ["stager=pinned_cached", "join.throw=true", "train.steps=8", "checkpoint.every=4", *ranks]
    done = run(*overrides, f"hydra.run.dir={tmp_path}/run", cwd=SCRIPT.parent, script=Path("train.py"))
    assert done.returncode == 0, done.stderr
    shown = ("steps", "samples", "loss, first and last", "checkpoints", "staged", "stall per", "write per", "shadowed")
    assert [row for row in shown if not re.search(rf"^  {row}", done.stdout, re.M)] == [], done.stdout
    latest = tmp_path / "run" / "checkpoints" / "latest"
    weight = torch.zeros(256, 16)
    dcp.load({"model": {"token.weight": weight}}, checkpoint_id=str(latest))
    assert torch.equal(weight, saved(latest.resolve(), tmp_path)["model"]["token.weight"])
    assert weight.abs().sum() > 0
    assert len(list(tmp_path.glob("run/*.log"))) == 1


@pytest.mark.slow
def test_uneven_fsdp2_resumes_where_a_rank_has_no_batch_left(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    overrides = ["data=uneven", "parallel=fsdp2", "data.files=4", "train.steps=24", "checkpoint.every=16"]
    overrides.append(f"hydra.run.dir={tmp_path}/run")
    done = run(*overrides, f"checkpoint.dir={whole}", cwd=tmp_path)
    steps, shadowed = uneven(done)
    assert shadowed[0] == 0 < steps - 16 < shadowed[1] < steps
    assert "Warning" not in done.stderr
    shutil.copytree(whole / "step-00000016", resumed / "step-00000016")
    (resumed / "latest").symlink_to("step-00000016")
    again = run(*overrides, f"checkpoint.dir={resumed}", "checkpoint.resume=auto", cwd=tmp_path)
    assert uneven(again) == (steps - 16, [0, steps - 16])
    ends = [saved(folder / f"step-{steps:08d}", tmp_path) for folder in (whole, resumed)]
    assert differing(*ends) == []
    assert differing(ends[0], saved(whole / "step-00000016", tmp_path)) != []


UNEVEN = ["data=uneven", "join.throw=true", "data.files=8", "train.steps=60", "checkpoint.every=1000"]


@pytest.mark.slow
def test_throw_stops_all_ranks_at_one_step_and_names_the_reason(tmp_path: Path) -> None:
    done = run(*UNEVEN, "join.mode=counted", f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    latest = (tmp_path / "run/checkpoints/latest").resolve()
    (message,) = re.findall(r".*exhausted all inputs.*", done.stderr + done.stdout)
    assert re.match(r"rank \d: Rank \d exhausted all inputs", message)
    step = int(latest.name.removeprefix("step-"))
    assert saved(latest, tmp_path)["stagereg.step"] == step > 0
