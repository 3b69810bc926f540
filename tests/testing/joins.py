"""Contracts of the project's own joinables and hooks, and of torch's, as an author would write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stagereg.registry import build
from stagereg.testing.join import JoinableContract


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def inputs(value: float) -> torch.Tensor:
    return torch.tensor([[value, 1.0, -value / 2], [1.0, value, 0.5]], dtype=torch.float64)


def loss_of(module: nn.Module, value: float) -> torch.Tensor:
    return module(inputs(value)).square().sum()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Training:
    """A model and what steps it: an optimizer with a memory, a schedule, and an average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = [p.detach().clone() for p in model.parameters()]

    def advance(self) -> None:
        """All that follows the last backward of a step."""
        self.optimizer.step()
        self.schedule.step()
        for mean, param in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.25)

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        return {
            "weights": [whole(p) for p in self.model.parameters()],
            "moments": [whole(state[i]["exp_avg"]) for i in sorted(state)],
            "steps": [state[i]["step"] for i in sorted(state)],
            "lr": self.optimizer.param_groups[0]["lr"],
            "average": [whole(mean) for mean in self.average],
        }


class DdpContract(JoinableContract):
    """``ddp`` and ``step``: a DDP module, and one function for all that follows its backward."""

    kind = "ddp"
    names: tuple[str, ...] = ("weights", "moments", "steps", "lr", "average")

    def build(self) -> Any:
        return Training(DistributedDataParallel(net()))

    def joinables(self, subject: Any) -> list[Any]:
        model = build("joinable", self.kind, module=subject.model)
        return [model, build("joinable", "step", step=subject.advance, after=model)]

    def step(self, subject: Any, value: float) -> Any:
        subject.optimizer.zero_grad()
        loss = loss_of(subject.model, value)
        loss.backward()
        subject.advance()
        return loss

    def state(self, subject: Any) -> dict[str, Any]:
        return {name: value for name, value in subject.state().items() if name in self.names}

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        return DdpContract.state(self, self.single(steps, world_size))

    def divisor(self, values: list[float], world_size: int) -> int:
        return world_size

    def alone(self) -> Training:
        return Training(net())

    def single(self, steps: list[list[float]], world_size: int) -> Training:
        """The same training in one process."""
        training = self.alone()
        for values in steps:
            training.optimizer.zero_grad()
            for value in values:
                (loss_of(training.model, value) / self.divisor(values, world_size)).backward()
            training.advance()
        return training


class ActiveContract(DdpContract):
    """``ddp`` with the mean over the active ranks."""

    world_size = 3
    options = {"divide_by_initial_world_size": False}  # noqa: RUF012
    own_collectives = 1  # to know how many are active

    def divisor(self, values: list[float], world_size: int) -> int:
        return len(values)


class Fsdp2Contract(DdpContract):
    """``fsdp2``."""

    kind = "fsdp2"

    def build(self) -> Any:
        module = net()
        fully_shard(module[0])
        fully_shard(module)
        return Training(module)


class Sharded(Training):
    """A DDP module and a ``ZeroRedundancyOptimizer``."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(net())
        self.optimizer: Any = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.Adam, lr=0.05)
        self.advance = self.optimizer.step

    def state(self) -> dict[str, Any]:
        for rank in range(dist.get_world_size()):
            self.optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = self.optimizer.state_dict()["state"]
        moments = [state[i]["exp_avg"] for i in sorted(state)]
        return {"weights": [p.detach() for p in self.model.parameters()], "moments": moments}


class ZeroContract(DdpContract):
    """``zero``."""

    names = ("weights", "moments")

    def build(self) -> Any:
        return Sharded()

    def joinables(self, subject: Any) -> list[Any]:
        ddp = build("joinable", "ddp", module=subject.model)
        return [ddp, build("joinable", "zero", optimizer=subject.optimizer, after=ddp)]

    def alone(self) -> Training:
        training: Any = Training(net())
        training.advance = training.optimizer.step
        return training


class MetricsContract(DdpContract):
    """``metrics``: after a model, which announces for it."""

    def build(self) -> Any:
        training = super().build()
        training.metrics = build("joinable", "metrics")
        training.computed = {}
        return training

    def joinables(self, subject: Any) -> list[Any]:
        return [*super().joinables(subject), subject.metrics]

    def step(self, subject: Any, value: float) -> None:
        loss = super().step(subject, value)
        subject.metrics.add(loss=(loss.detach(), 2), value=(value, 1))
        subject.computed = subject.metrics.compute()  # those who have left answer

    def state(self, subject: Any) -> dict[str, Any]:
        return {**subject.state(), **subject.metrics.compute()}

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        losses = 0.0
        for step, values in enumerate(steps):
            model = self.single(steps[:step], world_size).model
            losses += sum(loss_of(model, value).item() for value in values)
        count = sum(map(len, steps))
        means = {"loss": losses / count / 2, "value": sum(map(sum, steps)) / count} if count else {}
        return {**super().expected(steps, world_size), **means}


class ModuleContract(DdpContract):
    """``module``, of a model that reduces its gradients itself: only in ``join.iterate``."""

    torch_join = False

    def build(self) -> Any:
        return Training(net())

    def joinables(self, subject: Any) -> list[Any]:
        return [build("joinable", "module", module=subject.model)]

    def loop(self, join: Any, subject: Any, values: list[float]) -> None:
        for x in join.iterate([inputs(value) for value in values]):
            self.step(subject, x)

    def step(self, subject: Any, value: Any) -> None:
        subject.optimizer.zero_grad()
        subject.model(value if isinstance(value, torch.Tensor) else inputs(value)).square().sum().backward()
        for param in subject.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        subject.advance()


class Verbatim:
    """A joinable of torch's as it is: stagereg's ``Join`` would replace a bare module by its own joinable."""

    def __init__(self, joinable: Any) -> None:
        vars(self)["joinable"] = joinable

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["joinable"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.joinable, name, value)


class TorchsDdp(DdpContract):
    """``Join([ddp])``, as torch has it; held to the weights alone."""

    announces = False
    timeout_s = 12.0
    names = ("weights",)

    def joinables(self, subject: Any) -> list[Any]:
        return [Verbatim(subject.model)]


class TorchsZero(ZeroContract):
    """``Join([ddp, zero])``, as torch has it."""

    announces = False
    timeout_s = 12.0

    def joinables(self, subject: Any) -> list[Any]:
        return [Verbatim(subject.model), Verbatim(subject.optimizer)]


TORCHS: dict[str, type[JoinableContract]] = {
    "torch's `DistributedDataParallel`": TorchsDdp,
    "... with `ZeroRedundancyOptimizer`": TorchsZero,
}
