"""One training case, run twice: on ranks inside a join, and in a single process that computes the expected numbers.

The single process has no DDP, no join and no collectives. At each step it adds up the gradients of the ranks that still
have a batch, divides by the world size or by the number of those ranks, and steps one optimizer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import stagereg
import stagereg.join.session as session
from stagereg.base.providers import has

from .parallel import COLUMNS, Ddp, full, write_values

EXACT = 1e-12
"""What float64 sums in another order may differ by after a few steps."""

JOINABLES = has("joinables")
"""Whether the extension with ``fsdp2``, ``zero`` and ``metrics`` is installed; else the core is tested without them."""


def sharded_adam(model: Any, **kwargs: Any) -> Any:
    """Return Adam, sharded over the ranks if a join takes such an optimizer."""
    adam = torch.optim.Adam
    params = model.parameters()
    return ZeroRedundancyOptimizer(params, adam, **kwargs) if JOINABLES else adam(params, lr=kwargs["lr"])


def await_published() -> None:
    """Wait until the others can read that this rank is in its join, and in which step, as it is now."""
    detector = session._entered.get()[-1].peers.detector
    beat = detector._beat
    while detector._beat < beat + 2:  # then the status after `beat` is in the store
        time.sleep(0.01)


@dataclass(frozen=True)
class Case:
    """A training loop: what it trains, on how many batches, and what its body looks like."""

    lengths: tuple[int, ...] = (2, 4, 6)
    epochs: int = 1
    one_join: bool = True  # one Join object entered in every epoch, or a new one each time
    net: str = "mlp"
    optimizer: str = "adam"
    column: str = "ddp"  # how it is trained, of COLUMNS
    zero: str = "none"  # gradients are set to "none" or to "zeros", or "never" zeroed
    when: str = "start"  # ... at the "start" of the step, "between" forward and backward, or at the "end"
    last: str = "optimizer"  # what the join is given besides the model: "optimizer", "scheduler" or "function"
    divide: bool = True
    accumulate: int = 1
    forwards: int = 1  # before each backward, with one under no_grad where there are two
    wrap: dict[str, Any] = field(default_factory=dict)  # arguments for the wrapper of the column
    comm_hook: str = ""  # of HOOKS, which divide by the world size in any case


class Branches(nn.Module):
    """A net whose second branch is used in every second step only; the batch determines the step."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


@dataclass
class Output:
    """What a model returns that is no container of torch's."""

    loss: torch.Tensor

    def sum(self) -> torch.Tensor:
        return self.loss


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.inner(x).sum())


class Nested(nn.Module):
    """Takes a keyword, and gives nested outputs of which only some have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x)) * scale
        return {"samples": torch.tensor(len(x)), "none": None, "parts": [hidden.sum(), (self.second(hidden),)]}


class Hiding(nn.Module):
    """Returns an object of which nobody can tell the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        total = self.inner(x).sum()
        return SimpleNamespace(sum=lambda: total)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


NETS = {
    "mlp": mlp,
    "norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
    "branches": Branches,
    "dataclass": Wrapping,
    "hiding": Hiding,
    "nested": Nested,
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}

HOOKS: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "builtin allreduce": dist.BuiltinCommHookType.ALLREDUCE,
    "builtin fp16": dist.BuiltinCommHookType.FP16_COMPRESS,
}


def net(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return NETS[case.net]().double()


def batch(rank: int, epoch: int, step: int, count: int = 3) -> torch.Tensor:
    seed = torch.Generator().manual_seed(997 * rank + 31 * epoch + step)
    x = torch.randn(count, 4, generator=seed, dtype=torch.float64)
    x[0, 0] = 1.0 if step % 2 == 0 else -1.0
    return x


class Training:
    """The optimizer, schedule and average of a model, and the lines of a loop that use them."""

    def __init__(self, case: Case, module: nn.Module, column: Ddp | None = None) -> None:
        self.case, self.module, self.column = case, module, column or Ddp()
        kind, options = OPTIMIZERS[case.optimizer]
        parameters = list(module.parameters())
        self.optimizer = self.column.optimizer(module, kind, options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = [torch.zeros_like(p) for p in parameters]

    def zero(self, moment: str) -> None:
        if self.case.zero != "never" and self.case.when == moment:
            self.optimizer.zero_grad(set_to_none=self.case.zero == "none")

    def finish(self) -> None:
        """All that follows the last backward of a step; what joined ranks run if the join is given a function."""
        if self.case.last == "function":
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.7)
        self.optimizer.step()
        if self.case.last != "optimizer":
            self.scheduler.step()
        if self.case.last == "function":
            for mean, param in zip(self.average, self.module.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.1)
        self.zero("end")

    def joinables(self, model: Any) -> list[Any]:
        if self.case.last == "function":
            return [model, self.finish]
        return [model, self.optimizer] + [self.scheduler] * (self.case.last == "scheduler")

    def outcome(self) -> dict[str, Any]:
        """All that must be equal on every rank and in the single process."""
        return {
            "params": self.column.params(self.module),
            "buffers": self.column.buffers(self.module),
            "state": self.column.state(self.module, self.optimizer),
            "lr": torch.tensor(self.optimizer.param_groups[0]["lr"]),
            "schedule": torch.tensor(self.scheduler.last_epoch),
            "average": [full(mean) for mean in self.average],
        }


def train(rank: int, world_size: int, case: Case, library: str = "ours") -> dict[str, Any]:
    """Run the case on ranks, with our Join ("ours", or in a mode: "counted", "planned"), our joinables in torch's
    ("torch"), or taking turns ("mixed"; "mixed iterate": where it is ours, in a loop over ``join.iterate``)."""
    model = wrapped(case)
    training = Training(case, getattr(model, "module", model), COLUMNS[case.column]())
    ours = library != "torch" and not (library.startswith("mixed") and rank % 2)
    listed = training.joinables(model) if ours else named(training.joinables(model))
    join = None
    for epoch in range(case.epochs):
        data = [batch(rank, epoch, step) for step in range(length(case, rank, epoch))]
        if join is None or not case.one_join or library == "planned":
            kind, options = join_of(library if ours else "torch", data)
            join = kind(listed, divide_by_initial_world_size=case.divide, **options)
        with join:
            for step, x in enumerate(join.iterate(data) if ours and library == "mixed iterate" else data):
                train_step(training, model, step, x)
    return training.outcome()


def train_step(training: Training, model: Any, step: int, x: torch.Tensor) -> None:
    """The body of the loop."""
    case = training.case
    starts, syncs = step % case.accumulate == 0, (step + 1) % case.accumulate == 0
    if starts:
        training.zero("start")
    with training.column.gate(model, syncs):
        loss = loss_of(case, model, x)
        if starts:
            training.zero("between")
        loss.backward()
    if syncs:
        training.finish()


def loss_of(case: Case, model: Any, x: torch.Tensor) -> torch.Tensor:
    """What a step makes smaller."""
    more = {"scale": torch.tensor(2.0)} if case.net == "nested" else {}
    if case.forwards > 1 and case.column != "fsdp2":  # whose forwards are collectives, also those
        with torch.no_grad():
            model(x, **more)
    total = torch.zeros((), dtype=x.dtype)
    for i in range(case.forwards):
        outputs = pytree.tree_leaves(model(x * (i + 1), **more))
        total = total + sum(output.sum() for output in outputs if output is not None)
    return total


def wrapped(case: Case) -> Any:
    """The net of a case, wrapped."""
    model = COLUMNS[case.column]().wrap(net(case), **case.wrap)
    if case.comm_hook.startswith("builtin"):
        model._register_builtin_comm_hook(HOOKS[case.comm_hook])
    elif case.comm_hook:
        model.register_comm_hook(None, HOOKS[case.comm_hook])
    return model


def join_of(library: str | None, loader: Any = None) -> tuple[Any, dict[str, Any]]:
    """The ``Join`` of a library, and the options of its mode."""
    if library == "torch":
        return TorchJoin, {}
    if library == "mixed iterate":
        return stagereg.Join, {"mode": "torch"}
    if library in ("counted", "planned"):
        return stagereg.Join, {"mode": library, "loader": loader if library == "planned" else None}
    return stagereg.Join, {}


def named(joinables: list[Any]) -> list[Any]:
    """The joinables that ``stagereg.Join`` would make of a list, as torch's ``Join`` needs them."""
    kind = "ddp" if isinstance(joinables[0], DistributedDataParallel) else "fsdp2"
    model = stagereg.build("joinable", kind, module=joinables[0])
    rest = []
    for each in joinables[1:]:
        if isinstance(each, ZeroRedundancyOptimizer):
            rest.append(stagereg.build("joinable", "zero", optimizer=each, after=model))
        else:
            rest.append(stagereg.build("joinable", "step", step=getattr(each, "step", each), after=model))
    return [model, *rest]


def length(case: Case, rank: int, epoch: int) -> int:
    """Batches of a rank; in every second epoch the lengths are reversed."""
    return case.lengths[rank] if epoch % 2 == 0 else case.lengths[::-1][rank]


def expected(case: Case, library: str = "ours") -> dict[str, Any]:
    """Run the case in this process; on torch's wire it is the highest rank whose buffers count, else the lowest."""
    whose = min if library in ("planned", "counted") else max
    module = net(case)
    training = Training(case, module)
    params = list(module.parameters())
    world = range(len(case.lengths))
    by_all = case.divide or case.comm_hook
    window: list[torch.Tensor | None] = [None] * len(params)  # of all ranks, since the last reduction
    buffers = {rank: [b.clone() for b in module.buffers()] for rank in world}
    shares = True  # as DDP does where the step before has reduced
    for epoch in range(case.epochs):
        for step in range(max(length(case, rank, epoch) for rank in world)):
            active = [rank for rank in world if length(case, rank, epoch) > step]
            if case.zero != "never" and case.when != "end" and step % case.accumulate == 0:
                training.zero(case.when)
                window = [None] * len(params)
            shared = [b.clone() for b in buffers[whose(active)]]
            for rank in active:
                write_values(module.buffers(), shared if shares else buffers[rank])
                grads = torch.autograd.grad(loss_of(case, module, batch(rank, epoch, step)), params, allow_unused=True)
                window = [_plus(total, grad) for total, grad in zip(window, grads, strict=True)]
                buffers[rank] = [b.clone() for b in module.buffers()]
            shares = (step + 1) % case.accumulate == 0
            if shares:
                for param, total in zip(params, window, strict=True):
                    if total is not None:
                        param.grad = _plus(param.grad, total / (len(world) if by_all else len(active)))
                window = [None] * len(params)
                training.finish()
        longest = max(length(case, rank, epoch) for rank in world)
        last = whose(rank for rank in world if length(case, rank, epoch) == longest)
        buffers = {rank: [b.clone() for b in buffers[last]] for rank in world}
    write_values(module.buffers(), buffers[0])
    return training.outcome()


def difference(one: Any, other: Any) -> float:
    """The largest difference between two outcomes, relative above 1; infinite where they have not the same parts."""
    if isinstance(one, torch.Tensor):
        apart = (one.double() - other.double()).abs() / other.double().abs().clamp(min=1.0)
        return float(apart.nan_to_num(nan=float("inf")).max()) if one.shape == other.shape else float("inf")
    if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
        return float("inf")
    keys = one.keys() if isinstance(one, dict) else range(len(one))
    return max((difference(one[key], other[key]) for key in keys), default=0.0)


def _plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other
