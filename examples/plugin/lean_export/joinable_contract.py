"""How the joinable and its hook are checked: by pytest, or by ``stagereg check lean-export`` once it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stagereg
import torch
from stagereg.testing import JoinableContract, JoinHookContract
from torch import nn

from lean_export.hook import EmaHook
from lean_export.joinable import EmaJoinable
from lean_export.training import Training

__all__ = ["EmaContract", "EmaHookContract"]


class AveragedTraining(Training):
    """A training with the average of its weights."""

    def __init__(self, world_size: int | None = None) -> None:
        super().__init__(world_size)
        self.ema = EmaJoinable(self.model, decay=0.5)

    def step(self, values: Sequence[float]) -> None:
        """Learn, and average."""
        super().step(values)
        self.ema.update()

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return self.ema.state_dict()


class EmaContract(JoinableContract):
    """``joinable=ema`` in a join with a DDP module and its optimizer."""

    def build(self) -> AveragedTraining:
        """Return a training run on this rank."""
        return AveragedTraining()

    def joinables(self, subject: AveragedTraining) -> list[Any]:
        """Return what stagereg's ``Join`` would make of [model, optimizer, ema], which torch's takes as well."""
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        step = stagereg.build("joinable", "step", step=subject.optimizer.step, after=ddp)
        subject.ema.after = ddp
        return [ddp, step, subject.ema]

    def step(self, subject: AveragedTraining, value: float) -> None:
        """Take one step on a rank that has data; ``value`` stands for its batch."""
        subject.step([value])

    def state(self, subject: AveragedTraining) -> dict[str, Any]:
        """Return what must be right on every rank after the join."""
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return the same from one process, which takes the batches of all ranks at once."""
        alone = AveragedTraining(world_size)
        for values in steps:
            alone.step(values)
        return alone.state()


class Constant(nn.Module):
    """A weight that never changes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("shift", torch.ones(2))


class EmaHookContract(JoinHookContract):
    """``join_hook=ema`` by itself: the average moves as often on ranks without data as on others."""

    def build(self) -> EmaJoinable:
        """Return an average that is on its way from 0 to 1."""
        constant = Constant()
        ema = EmaJoinable(constant, decay=0.5)
        nn.init.ones_(constant.weight)
        return ema

    def hook(self, subject: EmaJoinable) -> EmaHook:
        """Return the hook for one join."""
        return EmaHook(subject)

    def step(self, subject: EmaJoinable, value: float) -> None:
        """Take one step on a rank that has data."""
        subject.update()

    def state(self, subject: EmaJoinable) -> dict[str, Any]:
        """Return the average."""
        return subject.state_dict()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return it after so many updates."""
        alone = self.build()
        for _ in steps:
            alone.update()
        return alone.state_dict()
