"""Contracts of the project's own joinables and hooks, and of torch's, as an author would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg
from stagereg.join.kinds.collective import CollectiveHook, CollectiveJoinable
from stagereg.join.kinds.step import StepHook, StepJoinable
from stagereg.join.kinds.zero import ZeroHook, ZeroJoinable
from stagereg.testing.join import JoinableContract, JoinHookContract
from stagereg.testing.minimal_joinable import MinimalJoinable


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def inputs(value: float) -> torch.Tensor:
    return torch.tensor([[value, 1.0, -value / 2], [1.0, value, 0.5]], dtype=torch.float64)


def loss_of(module: nn.Module, value: float) -> torch.Tensor:
    return module(inputs(value)).square().sum()


class Training:
    """A model and what steps it: an optimizer with a memory, a schedule, and an average of the weights."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.05)
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


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def single(steps: list[list[float]], divisor: int) -> Training:
    """The same training in one process."""
    training = Training(net())
    for values in steps:
        training.optimizer.zero_grad()
        for value in values:
            (loss_of(training.model, value) / divisor).backward()
        training.advance()
    return training


class DdpContract(JoinableContract):
    """``ddp`` and ``step``: a DDP module, and one function for all that follows its backward."""

    def build(self) -> Training:
        return Training(DistributedDataParallel(net()))

    def joinables(self, subject: Training) -> Sequence[Any]:
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        return [ddp, stagereg.build("joinable", "step", step=subject.advance, after=ddp)]

    def step(self, subject: Training, value: float) -> None:
        subject.optimizer.zero_grad()
        loss_of(subject.model, value).backward()
        subject.advance()

    def state(self, subject: Training) -> Mapping[str, Any]:
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return single(steps, world_size).state()


class Fsdp2Contract(DdpContract):
    """``fsdp2``."""

    def build(self) -> Training:
        module = net()
        fully_shard(module[0])
        fully_shard(module)
        return Training(module)

    def joinables(self, subject: Training) -> Sequence[Any]:
        fsdp2 = stagereg.build("joinable", "fsdp2", module=subject.model)
        return [fsdp2, stagereg.build("joinable", "step", step=subject.advance, after=fsdp2)]


class Sharded:
    """A DDP module and a ``ZeroRedundancyOptimizer``."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(net())
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.Adam, lr=0.05)

    def state(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        for rank in range(dist.get_world_size()):
            self.optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = self.optimizer.state_dict()["state"]
        return {
            "weights": [p.detach() for p in self.model.parameters()],
            "moments": [state[i]["exp_avg"] for i in sorted(state)],
        }


class ZeroContract(JoinableContract):
    """``zero``."""

    def build(self) -> Sharded:
        return Sharded()

    def joinables(self, subject: Sharded) -> Sequence[Any]:
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        return [ddp, stagereg.build("joinable", "zero", optimizer=subject.optimizer, after=ddp)]

    def step(self, subject: Sharded, value: float) -> None:
        subject.optimizer.zero_grad()
        loss_of(subject.model, value).backward()
        subject.optimizer.step()

    def state(self, subject: Sharded) -> Mapping[str, Any]:
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        training = Training(net())
        for values in steps:
            training.optimizer.zero_grad()
            for value in values:
                (loss_of(training.model, value) / world_size).backward()
            training.optimizer.step()
        state = training.state()
        return {"weights": state["weights"], "moments": state["moments"]}


class Totals:
    """Adds up one number a step over the ranks, and keeps what came out."""

    def __init__(self) -> None:
        self.sum = stagereg.build("joinable", "collective", collectives=[{"op": "all_reduce", "dtype": "float64"}])
        self.seen: list[float] = []


def everything(seen: list[float]) -> dict[str, float]:
    """How many sums the ranks have been given, and what they add up to."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    return {"sums": sum(map(len, gathered)), "of sums": sum(map(sum, gathered))}


class CollectiveContract(JoinableContract):
    """``collective``: the sums are known to the ranks that had data; together they know all."""

    world_size = 3

    def build(self) -> Totals:
        return Totals()

    def joinables(self, subject: Totals) -> Sequence[Any]:
        return [subject.sum]

    def step(self, subject: Totals, value: float) -> None:
        (total,) = subject.sum(torch.tensor(value, dtype=torch.float64))
        subject.seen.append(float(total))

    def state(self, subject: Totals) -> Mapping[str, Any]:
        return everything(subject.seen)

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"sums": sum(map(len, steps)), "of sums": sum(len(values) * sum(values) for values in steps)}


class Metered(Training):
    """A training whose loss is added up."""

    def __init__(self) -> None:
        super().__init__(DistributedDataParallel(net()))
        self.metrics = stagereg.build("joinable", "metrics")
        self.computed: dict[str, float] = {}


class MetricsContract(DdpContract):
    """``metrics``: after a model, which announces for it."""

    def build(self) -> Metered:
        return Metered()

    def joinables(self, subject: Any) -> Sequence[Any]:
        return [*super().joinables(subject), subject.metrics]

    def step(self, subject: Any, value: float) -> None:
        subject.optimizer.zero_grad()
        loss = loss_of(subject.model, value)
        loss.backward()
        subject.advance()
        subject.metrics.add(loss=(loss.detach(), 2), value=(value, 1))
        subject.computed = subject.metrics.compute()  # those who have left answer

    def state(self, subject: Any) -> Mapping[str, Any]:
        return {**subject.state(), **subject.metrics.compute()}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        model = net()
        training = Training(model)
        losses = 0.0
        for values in steps:
            losses += sum(loss_of(model, value).item() for value in values)
            training.optimizer.zero_grad()
            for value in values:
                (loss_of(model, value) / world_size).backward()
            training.advance()
        count = sum(map(len, steps))
        means = {"loss": losses / count / 2, "value": sum(map(sum, steps)) / count} if count else {}
        return {**training.state(), **means}


class Kept:
    """Where a checkpoint goes: saves like a checkpointer, together with all ranks, into this process's memory."""

    every = 4
    preemption = None

    def __init__(self) -> None:
        self.saved: dict[int, Any] = {}

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int, state: Any) -> None:
        everywhere = torch.stack([p.detach().sum() for p in state["model"].parameters()])
        dist.all_reduce(everywhere)
        self.saved[step] = everywhere / dist.get_world_size()


class Saving(Training):
    """A training with checkpoints inside."""

    def __init__(self) -> None:
        super().__init__(DistributedDataParallel(net()))
        self.kept = Kept()
        self.number = 0
        state = {"model": self.model, "optimizer": self.optimizer}
        self.saver = stagereg.build("joinable", "checkpoint", checkpointer=self.kept, state=state, module=self.model)

    def advance(self) -> None:
        super().advance()
        self.number += 1


class CheckpointContract(DdpContract):
    """``checkpoint``: comes first, and exchanges once a step what was asked for."""

    own_collectives = 3  # an exchange, and where there is a checkpoint to save, what the ranks hold
    keeps = ("saved",)

    def build(self) -> Saving:
        return Saving()

    def joinables(self, subject: Any) -> Sequence[Any]:
        return [subject.saver, *super().joinables(subject)]

    def step(self, subject: Any, value: float) -> None:
        super().step(subject, value)
        subject.saver.maybe(subject.number)

    def state(self, subject: Any) -> Mapping[str, Any]:
        return {**subject.state(), "saved": subject.kept.saved}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        saved = {}
        for step in range(Kept.every, len(steps) + 1, Kept.every):
            model = single(steps[:step], world_size).model
            saved[step] = torch.stack([p.detach().sum() for p in model.parameters()])
        return {**super().expected(steps, world_size), "saved": saved}


class ByHand(Training):
    """A model that reduces its gradients itself; who has left the loop cannot know of it."""

    def __init__(self) -> None:
        super().__init__(net())


class ModuleContract(DdpContract):
    """``module``: only within ``join.iterate``, whose body runs on all ranks."""

    torch_join = False

    def build(self) -> ByHand:
        return ByHand()

    def joinables(self, subject: Any) -> Sequence[Any]:
        return [stagereg.build("joinable", "module", module=subject.model)]

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


class CollectiveHookContract(JoinHookContract):
    """The ``collective`` hook alone."""

    def build(self) -> list[float]:
        return []

    def hook(self, subject: list[float]) -> Any:
        return CollectiveHook(CollectiveJoinable([{"op": "all_reduce", "dtype": "float64"}]))

    def step(self, subject: list[float], value: float) -> None:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        subject.append(float(total))

    def state(self, subject: list[float]) -> Mapping[str, Any]:
        return everything(subject)

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"sums": sum(map(len, steps)), "of sums": sum(len(values) * sum(values) for values in steps)}


class Counter:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> None:
        self.count += 1


class StepHookContract(JoinHookContract):
    """The ``step`` hook alone."""

    def build(self) -> Counter:
        return Counter()

    def hook(self, subject: Counter) -> Any:
        return StepHook(StepJoinable(subject.advance))

    def step(self, subject: Counter, value: float) -> None:
        subject.advance()

    def state(self, subject: Counter) -> Mapping[str, Any]:
        return {"count": subject.count}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"count": len(steps)}


class ZeroHookContract(JoinHookContract, ZeroContract):
    """The ``zero`` hook after a model."""

    def joinables(self, subject: Sharded) -> Sequence[Any]:
        ddp = stagereg.build("joinable", "ddp", module=subject.model)
        return [ddp, MinimalJoinable(lambda: ZeroHook(ZeroJoinable(subject.optimizer, after=ddp)), self.device)]


class ActiveContract(DdpContract):
    """``ddp`` with the mean over the active ranks."""

    options = {"divide_by_initial_world_size": False}  # noqa: RUF012

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        training = Training(net())
        for values in steps:
            training.optimizer.zero_grad()
            for value in values:
                (loss_of(training.model, value) / len(values)).backward()
            training.advance()
        return training.state()


class Verbatim:
    """A joinable of torch's as it is: stagereg's ``Join`` would replace a bare module by its own joinable."""

    def __init__(self, joinable: Any) -> None:
        self.joinable = joinable

    @property
    def _join_config(self) -> Any:
        return self.joinable._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.joinable._join_config = config

    def join_hook(self, **kwargs: Any) -> Any:
        return self.joinable.join_hook(**kwargs)

    join_device = property(lambda self: self.joinable.join_device)
    join_process_group = property(lambda self: self.joinable.join_process_group)


class TorchsDdp(DdpContract):
    """``Join([ddp])``, as torch has it; held to the weights alone."""

    timeout_s = 12.0

    def joinables(self, subject: Training) -> Sequence[Any]:
        return [Verbatim(subject.model)]

    def state(self, subject: Training) -> Mapping[str, Any]:
        return {"weights": subject.state()["weights"]}

    def expected(self, steps: list[list[float]], world_size: int) -> Mapping[str, Any]:
        return {"weights": single(steps, world_size).state()["weights"]}


class TorchsZero(ZeroContract):
    """``Join([ddp, zero])``, as torch has it."""

    timeout_s = 12.0

    def joinables(self, subject: Sharded) -> Sequence[Any]:
        return [Verbatim(subject.model), Verbatim(subject.optimizer)]


TORCHS: dict[str, type[JoinableContract]] = {
    "torch's `DistributedDataParallel`": TorchsDdp,
    "... with `ZeroRedundancyOptimizer`": TorchsZero,
}
