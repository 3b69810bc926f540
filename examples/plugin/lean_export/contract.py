"""How the components of this package are checked: by pytest, or by ``stagereg check lean-export`` once it is installed.

Each says how to make the thing and what is to come out of it; the promises themselves are stagereg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stagereg
import torch
from stagereg.testing import JoinableContract, JoinHookContract, StagerContract
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lean_export.casting import WIDE
from lean_export.hook import EmaHook
from lean_export.joinable import EmaJoinable
from lean_export.stager import Bf16Stager
from lean_export.timed import TimedDdpHook

__all__ = ["Bf16Contract", "EmaContract", "EmaHookContract", "TimedDdpContract"]


class Bf16Contract(StagerContract):
    """``stager=bf16`` keeps every promise of a stager, but that its copies have another dtype."""

    def make(self) -> Bf16Stager:
        """Return a stager that casts whatever it can."""
        return Bf16Stager()

    def expected(self, tensor: Tensor) -> Tensor:
        """Return what it makes of a tensor."""
        return tensor.to(torch.bfloat16) if tensor.layout is torch.strided and tensor.dtype in WIDE else tensor


class Training:
    """A model that learns to answer a batch with its value, and the average of its weights.

    Args:
        world_size: by which gradients are divided; in a process group DDP does that.
    """

    def __init__(self, world_size: int | None = None) -> None:
        torch.manual_seed(0)
        module = nn.Linear(2, 1).double()
        self.world_size = world_size
        self.model: Any = module if world_size else DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.ema = stagereg.build("joinable", "ema", module=self.model, decay=0.5)

    def step(self, values: Sequence[float]) -> None:
        """Learn from the batches that some values stand for."""
        self.optimizer.zero_grad()
        x = torch.tensor([[value, value * value] for value in values], dtype=torch.float64)
        losses = (self.model(x) - x[:, :1]).square()
        (losses.sum() / (self.world_size or 1)).backward()
        self.optimizer.step()
        self.ema.update()

    def state(self) -> dict[str, Any]:
        """Return what is to be equal on all ranks."""
        state: dict[str, Any] = self.ema.state_dict()
        return state


class EmaContract(JoinableContract):
    """``joinable=ema`` in a join with a DDP module and its optimizer."""

    def build(self) -> Training:
        """Return a training run on this rank."""
        return Training()

    def joinables(self, subject: Training) -> list[Any]:
        """Return what stagereg's ``Join`` would make of [model, optimizer, ema], which torch's takes as well."""
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        step = stagereg.build("joinable", "step", step=subject.optimizer.step, after=ddp)
        subject.ema.after = ddp
        return [ddp, step, subject.ema]

    def step(self, subject: Training, value: float) -> None:
        """Take one step on a rank that has data."""
        subject.step([value])

    def state(self, subject: Training) -> dict[str, Any]:
        """Return the averages."""
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return them from one process, which takes the batches of all ranks at once."""
        alone = Training(world_size)
        for values in steps:
            alone.step(values)
        return alone.state()


class TimedDdpContract(EmaContract, JoinHookContract):
    """``join_hook=ddp_timed`` in the place of the ``ddp`` joinable's own hook, in the same training."""

    def joinables(self, subject: Training) -> list[Any]:
        """Return a list in which the hook of the DDP module is another one."""
        ddp, step, ema = super().joinables(subject)
        ddp.hook = TimedDdpHook
        return [ddp, step, ema]


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
