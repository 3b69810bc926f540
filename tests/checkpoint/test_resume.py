"""A run that stops and resumes ends where an uninterrupted one does, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.testing.ranks import run_ranks


class Run:
    """A small training run with all that has a state: dropout, batch statistics, a schedule, plain values."""

    def __init__(self, rank: int, world_size: int, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        # Batch statistics differ between the ranks of FSDP2, and rank 0's are saved.
        norm: Any = torch.nn.LayerNorm if kind == "fsdp2" else torch.nn.BatchNorm1d
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(6, 16), norm(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )
        wrap: Any = fully_shard if kind == "fsdp2" else DistributedDataParallel
        self.model = model if world_size == 1 else wrap(model)
        if kind == "zero":
            self.optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5, 7])
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            f"seen.rank{rank}": [rank],
        }
        torch.manual_seed(seed + rank)
        random.seed(seed + rank)

    def train(self, first: int, last: int, checkpointer: Checkpointer | None = None) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6) + random.random()).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state[next(name for name in self.state if name.startswith("seen"))].append(step)
            if checkpointer is not None:
                checkpointer.maybe_save(step, self.state)

    def everything(self) -> list[Any]:
        """All that a step depends on or changes, to be compared bit for bit."""
        inner = getattr(self.model, "module", self.model)
        optimizer = getattr(self.optimizer, "optim", self.optimizer).state_dict()
        groups = [
            {key: item for key, item in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        seen = next(value for name, value in self.state.items() if name.startswith("seen"))
        return [
            {name: own_bytes(tensor) for name, tensor in inner.state_dict().items()},
            {index: {name: own_bytes(item) for name, item in s.items()} for index, s in optimizer["state"].items()},
            groups,
            self.scheduler.state_dict(),
            seen,
            torch.get_rng_state().tolist(),
            random.getstate(),
        ]


def own_bytes(x: torch.Tensor) -> bytes:
    return (x.to_local() if isinstance(x, DTensor) else x).numpy().tobytes()


def train_in_two_parts(rank: int, world_size: int, kind: str, root: str) -> None:
    whole = Run(rank, world_size, kind, seed=1)
    whole.train(1, 10)

    first = Run(rank, world_size, kind, seed=1)
    with Checkpointer(root, every=5) as checkpointer:
        assert checkpointer.restore(first.state) is None
        first.train(1, 7, checkpointer)
        stats = checkpointer.stats

    second = Run(rank, world_size, kind, seed=99)
    with Checkpointer(root, every=5) as checkpointer:
        assert checkpointer.restore(second.state) == 5
        second.train(6, 10)
    assert second.everything() == whole.everything()
    assert first.everything() != whole.everything()
    assert checkpointer.stats.saves == 0
    assert len(stats.stall_seconds) == 1


@pytest.mark.parametrize(("kind", "nproc"), [("plain", 1), ("plain", 2), ("zero", 2), ("fsdp2", 2)])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path: Path, kind: str, nproc: int) -> None:
    run_ranks(train_in_two_parts, nproc=nproc, args=(kind, str(tmp_path)))
