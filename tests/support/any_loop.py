"""Training loops of any shape: on ranks inside a join, and in a single process that computes the expected numbers.

A :class:`Loop` names what differs between the programs of other people. Its body is written once. Ranks call it with
their own batch, and the single process with the batches of all ranks that still have one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import stagereg
from stagereg.testing import run_ranks

from .parallel import COLUMNS
from .reference import EXACT, batch, difference

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Loop:
    """One program."""

    lengths: tuple[int, int] = (2, 5)  # batches of each rank in an epoch
    epochs: int = 1
    one_join: bool = True  # around all epochs, or one for each; with a loader, always one for each
    iterates: bool = True
    mode: str | None = "planned"
    column: str = "ddp"  # or fsdp2
    uses: tuple[int, ...] = (0,)  # the models in the steps on one batch; (0, 0) takes two steps on each
    joint: bool = False  # one backward for all models, instead of one for each
    reverse: bool = False  # the list, against the order in which the loop uses the models
    k: int = 1  # steps of an optimizer come after so many batches
    no_sync: bool = False  # ... and only the last of them reduces gradients
    listed: str = "function"  # or the bare "optimizer"
    zeroes: str = "after"  # gradients are zeroed "after" a step, or "before" the backward that comes then
    to_none: bool = True  # ... set to None, or else to zeros
    begin: int = 0  # of the count of batches by which the optimizers step
    grad: str = (
        ""  # torch.autograd.grad: a "penalty" before or "penalty last", "attack" on the input, "norms" of gradients
    )
    forward: str = ""  # another one: "no_grad" before, or "twice" before the backward
    compiled: bool = False
    batch: str = (
        "tensor"  # or "dict" with a number, "list" of samples, "tuple" with a tensor of no dimension, "enumerate"
    )
    frozen: bool = False  # the other models, while one takes its step


class Run:
    """The models and optimizers of one process, and the body of its loop."""

    def __init__(self, loop: Loop, wrap: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.loop = loop
        count = max(loop.uses) + 1
        self.nets = [nn.Sequential(nn.Linear(4, 3 + i), nn.Tanh(), nn.Linear(3 + i, 1)).double() for i in range(count)]
        self.models = [wrap(net) for net in self.nets]
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in self.models]
        self.called = [torch.compile(model, backend="eager") if loop.compiled else model for model in self.models]
        self.advances = [loop.begin] * count

    def advance(self, i: int) -> None:
        """After each backward of a model."""
        self.advances[i] += 1
        if self.is_due(i, self.advances[i]):
            self.optimizers[i].step()
            if self.loop.zeroes == "after":
                self.optimizers[i].zero_grad(self.loop.to_none)

    def is_due(self, i: int, number: int) -> bool:
        uses = 1 if self.loop.joint else self.loop.uses.count(i)
        return number % (self.loop.k * uses) == 0 if self.loop.k > 1 else True

    def losses(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """The loss of each sample."""
        model, grad = self.called[i], self.loop.grad
        penalty = torch.zeros(len(x), dtype=x.dtype)
        if self.loop.forward == "no_grad":
            with torch.no_grad():
                x = x + 0.1 * model(x)
        if grad == "attack":
            for _ in range(2):
                x = x.detach().requires_grad_()
                x = x + 0.1 * torch.autograd.grad(model(x).sum(), x)[0].sign()
            x = x.detach()
        if grad == "penalty":
            penalty = self.penalty(model, x)
        losses = model(x).square().sum(1)
        if self.loop.forward == "twice":
            losses = losses + model(x * 0.5).sum(1)
        if grad == "penalty last":
            penalty = self.penalty(model, x)
        return losses + penalty

    @staticmethod
    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = (x * 0.5).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.square().sum(1) - 1).square()

    def body(self, batches: Sequence[torch.Tensor], mean: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        loop = self.loop
        for uses in [tuple(set(loop.uses))] if loop.joint else [(i,) for i in loop.uses]:
            for i in set(uses):
                if loop.zeroes == "before" and self.is_due(i, self.advances[i]):
                    self.optimizers[i].zero_grad(loop.to_none)
            for j, net in enumerate(self.nets):
                net.requires_grad_(not loop.frozen or j in uses)
            with contextlib.ExitStack() as gates:
                for i in set(uses):
                    sync = not loop.no_sync or self.is_due(i, self.advances[i] + 1)
                    gates.enter_context(self.gate(i, sync))
                each = [torch.stack([self.losses(i, x) for i in uses]).sum(0) for x in batches]
                loss = mean(each) / loop.k
                if loop.grad == "norms":
                    params = [param for i in set(uses) for param in self.models[i].parameters()]
                    torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)  # FSDP2's are others
                loss.backward()
            for i in uses:
                self.advance(i)

    def gate(self, i: int, sync: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


def data(loop: Loop, rank: int, epoch: int) -> list[torch.Tensor]:
    # In a plain loop a mean over a rank's own batch: of one size on all ranks, so that it is one over the samples.
    return [batch(rank, epoch, i, 3 + (i + rank * loop.iterates) % 2) for i in range(loop.lengths[rank])]


def one_process(loop: Loop) -> dict[str, Any]:
    run = Run(loop, lambda net: net)
    run.called = run.models
    for epoch in range(loop.epochs):
        loaders = [data(loop, rank, epoch) for rank in (0, 1)]
        for i in range(max(loop.lengths)):
            given = [loader[i] for loader in loaders if i < len(loader)]
            n = sum(map(len, given)) if loop.iterates else 2 * len(given[0])
            run.body(given, lambda each, n=n: torch.cat(list(each)).sum() / n)
    return result(run, COLUMNS["ddp"]())


def result(run: Run, column: Any) -> dict[str, Any]:
    return {
        f"{i}": {"params": column.params(net), "state": column.state(net, optimizer)}
        for i, (net, optimizer) in enumerate(zip(run.nets, run.optimizers, strict=True))
    }


def _pack(kind: str, batches: list[torch.Tensor]) -> list[Any]:
    if kind == "dict":
        return [{"x": x, "n": len(x)} for x in batches]
    if kind == "list":
        return [list(x) for x in batches]
    if kind == "tuple":
        return [(x, torch.tensor(len(x))) for x in batches]
    return list(enumerate(batches)) if kind == "enumerate" else batches


def _unpack(kind: str, packed: Any) -> tuple[torch.Tensor, Any]:
    if kind == "dict":
        return packed["x"], packed["n"]
    if kind == "list":
        x = torch.stack(packed) if packed else torch.zeros(0, 4, dtype=torch.float64)
        return x, len(packed)
    if kind == "tuple":
        return packed
    x = packed[1] if kind == "enumerate" else packed
    return x, len(x)


class RankRun(Run):
    """On a rank, with wrapped models."""

    def __init__(self, loop: Loop) -> None:
        self.column: Any = COLUMNS[loop.column]()
        super().__init__(loop, self.column.wrap)

    def gate(self, i: int, sync: bool) -> contextlib.AbstractContextManager[Any]:
        return self.column.gate(self.models[i], sync)

    def train(self, rank: int) -> dict[str, Any]:
        loop = self.loop
        used = list(dict.fromkeys(loop.uses))
        listed: list[Any] = []
        for i in reversed(used) if loop.reverse else used:
            listed += [
                self.called[i],
                self.optimizers[i] if loop.listed == "optimizer" else lambda i=i: self.advance(i),
            ]
        epochs = [_pack(loop.batch, data(loop, rank, epoch)) for epoch in range(loop.epochs)]
        example = [] if loop.batch == "list" else None
        joins = [epochs] if loop.one_join and loop.iterates else [[epoch] for epoch in epochs]
        for joined in joins:
            loader = None if loop.iterates or loop.mode == "torch" else joined[0]
            with stagereg.Join(listed, mode=loop.mode, timeout=TIMEOUT_S, loader=loader) as join:
                for epoch in joined:
                    for packed in join.iterate(epoch, example) if loop.iterates else epoch:
                        x, n = _unpack(loop.batch, packed)
                        if loop.iterates:
                            self.body([x], lambda each, n=n, join=join: join.mean(each[0].sum(), n))
                        else:
                            self.body([x], lambda each: each[0].mean())
        return result(self, self.column)


def train(rank: int, world_size: int, loop: Loop) -> tuple[Any, float]:
    """What the ranks end with, or the error of stagereg, and after how many seconds."""
    started = time.monotonic()
    try:
        return RankRun(loop).train(rank), time.monotonic() - started
    except stagereg.StageregError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started


def train_several(rank: int, world_size: int, loops: list[Loop]) -> list[tuple[Any, float]]:
    """As :func:`train`, one loop after another; until the first error, after which no rank can train."""
    found: list[tuple[Any, float]] = []
    while len(found) < len(loops) and not any(isinstance(each, str) for each, _ in found):
        found.append(train(rank, world_size, loops[len(found)]))
    return found


def apart(found: dict[str, Any], right: dict[str, Any]) -> float:
    return max(difference(found[name], each) for name, each in right.items())


def assert_exact(loops: list[Loop]) -> None:
    """Run loops one after another; all ranks have the numbers of one process."""
    for found in run_ranks(train_several, 2, args=(loops,), timeout_s=100 + 2 * len(loops)):
        wrong = {}
        for loop, (each, _) in zip(loops, found, strict=False):
            value = each if isinstance(each, str) else apart(each, one_process(loop))
            if isinstance(value, str) or not value < EXACT:
                wrong[loop] = value
        assert wrong == {}
        assert len(found) == len(loops)
