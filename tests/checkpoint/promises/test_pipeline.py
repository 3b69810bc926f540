"""Training through a pipeline schedule of torch is saved whole, and goes on as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from stagereg.assembly import Checkpointer
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

STAGES, BATCHES, WIDTH = 4, 4, 6


class Stage(torch.nn.Module):
    """One layer, under the name that it has in the whole."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(100 * seed + number)
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Pipeline:
    """Two stages a rank, in turns, under one optimizer."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.numbers = range(rank, STAGES, size)
        self.modules = [Stage(number, seed) for number in self.numbers]
        stages = [
            PipelineStage(module, number, STAGES, torch.device("cpu"))
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, BATCHES, loss_fn=torch.nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW([x for module in self.modules for x in module.parameters()], lr=0.01)
        self.state: dict[str, Any] = {"model": self.modules, "optimizer": self.optimizer}

    def step(self, step: int) -> None:
        torch.manual_seed(step)
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        given = (x,) if 0 in self.numbers else ()
        self.schedule.step(*given, target=y if STAGES - 1 in self.numbers else None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        found = [x for module in self.modules for x in module.state_dict().values()]
        return [*found, *(x for state in self.optimizer.state.values() for x in state.values())]


def interrupted(rank: int, size: int, root: str) -> bool:
    """Whether a run that is restored after two steps ends as one that goes on."""
    whole = Pipeline(rank, size, seed=1)
    with Checkpointer(root, stager=BlockingAsyncStager()) as keeper:
        for step in (1, 2):
            whole.step(step)
        keeper.save(2, whole.state)
        keeper.wait()
        resumed = Pipeline(rank, size, seed=2)
        assert keeper.restore(resumed.state) == 2
    for step in (3, 4):
        for each in (whole, resumed):
            each.step(step)
    dist.barrier()
    return all(map(torch.equal, whole.tensors(), resumed.tensors()))


def test_a_pipeline_goes_on_as_if_not_interrupted(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, args=(str(tmp_path),), timeout_s=120) == [True, True]
