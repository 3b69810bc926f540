"""The contracts of the joinable and its hook, for pytest and, once installed, ``stagereg check lean-export``."""

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
    """A training run with an average of its weights."""

    def __init__(self, world_size: int | None = None) -> None:
        super().__init__(world_size)
        self.ema = EmaJoinable(self.model, decay=0.5)

    def step(self, values: Sequence[float]) -> None:
        """Take one training step and update the average."""
        super().step(values)
        self.ema.update()

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return self.ema.state_dict()


class EmaContract(JoinableContract):
    """Tests ``joinable=ema`` in a join with a DDP module and its optimizer."""

    def build(self) -> AveragedTraining:
        """Return a training run on this rank."""
        return AveragedTraining()

    def joinables(self, subject: AveragedTraining) -> list[Any]:
        """Return the joinables that stagereg's ``Join`` makes of [model, optimizer, ema]; torch's accepts them too."""
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        step = stagereg.build("joinable", "step", step=subject.optimizer.step, after=ddp)
        subject.ema.after = ddp
        return [ddp, step, subject.ema]

    def step(self, subject: AveragedTraining, value: float) -> None:
        """Take one step on a rank with data; ``value`` determines its batch."""
        subject.step([value])

    def state(self, subject: AveragedTraining) -> dict[str, Any]:
        """Return the values that must be equal to ``expected`` on every rank after the join."""
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return the state of one process that trains on the batches of all ranks in each step."""
        alone = AveragedTraining(world_size)
        for values in steps:
            alone.step(values)
        return alone.state()


class Constant(nn.Module):
    """A module with a constant weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("shift", torch.ones(2))


class EmaHookContract(JoinHookContract):
    """Tests ``join_hook=ema`` alone: the number of updates is the same on ranks with and without data."""

    def build(self) -> EmaJoinable:
        """Return an average that moves from 0 to 1."""
        constant = Constant()
        ema = EmaJoinable(constant, decay=0.5)
        nn.init.ones_(constant.weight)
        return ema

    def hook(self, subject: EmaJoinable) -> EmaHook:
        """Return the hook for one join."""
        return EmaHook(subject)

    def step(self, subject: EmaJoinable, value: float) -> None:
        """Take one step on a rank with data."""
        subject.update()

    def state(self, subject: EmaJoinable) -> dict[str, Any]:
        """Return the average."""
        return subject.state_dict()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return the average after one update per step."""
        alone = self.build()
        for _ in steps:
            alone.update()
        return alone.state_dict()
