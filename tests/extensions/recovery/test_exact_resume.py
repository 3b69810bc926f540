"""A rank is killed: ``restore.exact`` resumes as if nothing had been; without it no random number is drawn again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ...support.programs import SAVING, Program

SCRIPT = """
import json, os, random, signal
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    rank = dist.get_rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7 + rank)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer, open(f"{cfg.answers}/{rank}.json", "a") as file:
        begun = checkpointer.restore(state) or 0
        for step in range(begun + 1, 11):
            draws = [random.random(), np.random.rand(), torch.rand(()).item()]
            print(json.dumps({"step": step, "draws": draws}), file=file, flush=True)
            optimizer.zero_grad()
            if step == 8:
                checkpointer.wait()  # for the checkpoint of step 5
            if (step, rank) == (8, cfg.dies):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.full((4, 8), sum(draws))).square().mean().backward()
            optimizer.step()
            checkpointer.maybe_save(step, state)
    if rank == 0:
        torch.save([model.module.state_dict(), optimizer.state_dict()], f"{cfg.answers}/end")


if __name__ == "__main__":
    train()
"""
CONFIG = f"""{SAVING}
nproc: 2
dies: -1
checkpoint: {{every: 5, keep: 1}}
"""


class Run:
    """One run of the program, from its own copy of a directory of checkpoints."""

    def __init__(self, folder: Path, of: Path | None, *arguments: str) -> None:
        folder.mkdir()
        self.program, self.root = Program(folder, CONFIG, SCRIPT), folder / "run"
        if of is not None:
            shutil.copytree(of, self.root, symlinks=True)
        self.ended = self.program.run(f"checkpoint.dir={self.root}", *arguments)

    def draws(self, rank: int) -> dict[int, list[float]]:
        """Return the random numbers that a rank drew, by step."""
        return {each["step"]: each["draws"] for each in self.program.answers_of(rank)}

    def end(self) -> Any:
        return torch.load(self.program.answers / "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole") / "run", None)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("killed") / "run", None, "dies=1")


def test_the_emergency_save_says_that_a_resume_is_not_exact_and_leaves_the_exact_one(killed: Run) -> None:
    assert killed.ended.returncode not in (0, 75)
    assert (
        f"Rank 0 saved step 7, in {killed.root}/step-00000007; missing from rank 1: random numbers. A resume from "
        "this step is not exact; with checkpoint.restore.exact=true the run resumes from step 5 instead."
    ) in killed.ended.stderr
    first, *_, last = killed.ended.stderr.splitlines()
    assert (first, last) == ("rank 1: killed by SIGKILL", "To resume, run the same command.")
    assert sorted(each.name for each in killed.root.glob("step-*")) == ["step-00000005", "step-00000007"]


def test_an_exact_resume_after_the_kill_of_a_rank_is_the_run_without_the_kill(
    tmp_path: Path, whole: Run, killed: Run
) -> None:
    resumed = Run(tmp_path / "exact", killed.root, "checkpoint.restore.exact=true")
    assert resumed.ended.returncode == 0, resumed.ended.stderr
    text = resumed.ended.stdout + resumed.ended.stderr
    assert "Resumed from step 5 instead of step 7: 2 steps are repeated." in text
    for rank in range(2):
        assert resumed.draws(rank) == {step: whole.draws(rank)[step] for step in range(6, 11)}
    for one, other in zip(tensors_of(resumed.end()), tensors_of(whole.end()), strict=True):
        assert torch.equal(one, other)


def tensors_of(value: Any) -> list[torch.Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, torch.Tensor) else [x for each in values for x in tensors_of(each)]


def test_by_default_the_failed_rank_continues_with_random_numbers_that_no_rank_has_drawn(
    tmp_path: Path, whole: Run, killed: Run
) -> None:
    resumed = Run(tmp_path / "first", killed.root)
    assert resumed.ended.returncode == 0, resumed.ended.stderr
    text = resumed.ended.stdout + resumed.ended.stderr
    assert "The resume from step 7 is not exact" in text
    assert "of rank 1: seeded from the checkpoint, its step and the rank: python, torch, numpy." in text
    assert [*resumed.draws(0)] == [8, 9, 10]
    assert resumed.draws(0)[8] == whole.draws(0)[8]
    drawn = {x for rank in range(2) for draws in whole.draws(rank).values() for x in draws}
    assert drawn.isdisjoint(x for draws in resumed.draws(1).values() for x in draws)
