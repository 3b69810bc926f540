"""Every case of the table has the numbers of a single process, in each way to train on several ranks and each mode.

A case is a loop body with ``join.iterate``; the columns are in ``parallel``. All cases of a column run one after
another in the same ranks, so none may leave anything behind. The single process has no join and no collective: at each
step it has the batches of all ranks that have one, and adds up their losses as the average asks for.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import stagereg
from stagereg.testing import run_ranks

from ..support.parallel import COLUMNS, Ddp, write_values
from ..support.reference import EXACT, JOINABLES, OPTIMIZERS, batch, difference

HOOKED = ("ddp", "zero", "fsdp2")
"""Of the columns, those that a join can leave out a rank of: at a lone break, and in the divisor."""
ALL = ("ddp", "zero", "fsdp1", "fsdp2") if JOINABLES else ("ddp", "fsdp1")
MODES = ("planned", "counted")
RANKS = 3
LOCK_TIMEOUT_S = 5.0
"""Seconds until a rank that does not come is an error on the others."""


@dataclass(frozen=True)
class Case:
    """A training loop, how many batches each rank has, and where it runs."""

    lengths: tuple[tuple[int, ...], ...] = ((2, 4, 6),)  # batches of each rank, epoch by epoch
    announced: tuple[int, ...] | None = None  # len of each rank's loader, if it is wrong
    loader: str = "list"  # has a length; "stream" has none, "torch" is a DataLoader whose last batch is smaller
    one_join: bool = False  # around all epochs
    net: tuple[str, ...] = ("mlp",)  # names of NETS, applied one after the other; each has its own optimizer
    optimizer: str = "adam"
    sizes: str = "equal"  # the batches of a rank have 3 samples, or ("mixed") from 1 to 5
    batch: str = "tensor"  # or "nested" dicts and lists
    average: str = "samples"  # of the join
    divide: bool = True  # the joinables' divide_by_initial_world_size
    accumulate: int = 1  # steps whose gradients are reduced together
    sync_last: bool = False  # a rank also reduces at the last batch of its own loader
    forwards: int = 1  # in each step, before the backward
    separate: bool = False  # each net has the batch, a loss and a backward of its own
    means: bool = False  # the body takes the mean of a batch's losses, which of an empty one is NaN
    extras: frozenset[str] = frozenset()  # what else is in the body, such as "clip" for clipped gradients
    skips: tuple[tuple[int, int], ...] = ()  # (rank, batch): the body continues over it before it does anything
    skips_empty: bool = False  # the body does so with every empty batch
    guards: tuple[int, ...] = ()  # steps that all ranks leave after the forward, as where a loss is not finite
    stop: int | None = None  # the step after which all ranks break
    breaks: tuple[tuple[int, int], ...] = ()  # (rank, step): that rank alone breaks after that step
    poisoned: bool = False  # the last batch of the first rank makes infinite gradients
    wrap: dict[str, Any] = field(default_factory=dict, hash=False)  # further arguments for the wrapper of a column
    fails: str = ""  # no numbers, but an error on every rank, in whose type and message this pattern is found
    columns: tuple[str, ...] = ALL
    modes: tuple[str, ...] = MODES

    @property
    def world(self) -> int:
        """Ranks that have data of their own."""
        return len(self.lengths[0])


BODY = frozenset({"clip", "schedule", "average", "loss"})
UNEVEN = Case()
CASES = {
    "even": Case(lengths=((3, 3, 3),)),
    "uneven": UNEVEN,
    "a rank without batches": Case(lengths=((0, 3, 5),)),
    "the last rank without batches": Case(lengths=((3, 5, 0),)),
    "one rank alone has batches": Case(lengths=((0, 0, 4),)),
    "no rank has batches": Case(lengths=((0, 0, 0),)),
    "two epochs, a rank without batches": Case(lengths=((0, 3, 5), (4, 0, 2)), one_join=True),
    "two epochs in one join": Case(lengths=((2, 4, 6), (6, 4, 2)), one_join=True),
    "batches of different sizes": Case(sizes="mixed"),
    "... averaged over the world": Case(sizes="mixed", average="world", extras=frozenset({"loss"})),
    "... averaged over active ranks": Case(sizes="mixed", average="active", extras=frozenset({"loss"})),
    "... a rank without batches, active": Case(lengths=((0, 3, 5),), sizes="mixed", average="active"),
    "... divided by active ranks": Case(sizes="mixed", divide=False, columns=HOOKED),
    "... all of that, over active ranks": Case(
        sizes="mixed", divide=False, average="active", lengths=((0, 3, 5),), columns=HOOKED
    ),
    "divided by active ranks, which it cannot": Case(
        divide=False, columns=("fsdp1",), fails="JoinError.*divides its gradients by the world size itself"
    ),
    "means of empty batches": Case(means=True, lengths=((0, 3, 5),), extras=frozenset({"loss"})),
    "a DataLoader": Case(loader="torch", batch="nested"),
    "a stream without a length": Case(loader="stream", modes=("auto",)),
    "a stream, a rank without batches": Case(loader="stream", lengths=((0, 3, 5),), modes=("auto",)),
    "nested batches": Case(batch="nested", lengths=((0, 3, 5),)),
    "skipped batches": Case(skips=((0, 1), (2, 0), (2, 5), (1, 3))),
    "all batches of a rank skipped": Case(skips=((0, 0), (0, 1))),
    "empty batches skipped": Case(skips_empty=True, columns=HOOKED),
    "empty batches skipped, none of its own": Case(skips_empty=True, columns=HOOKED, lengths=((3, 0, 5),)),
    "empty batches skipped, over the world": Case(skips_empty=True, columns=HOOKED, average="world", sizes="mixed"),
    "steps left after the forward": Case(guards=(2, 4, 6)),
    "... two models": Case(guards=(3, 4), net=("mlp", "head"), columns=("ddp", "zero", "fsdp1")),
    "all ranks break": Case(stop=3),
    "one rank breaks alone": Case(breaks=((2, 3),), columns=HOOKED),
    "the shortest breaks alone": Case(breaks=((0, 1),), columns=HOOKED, sizes="mixed"),
    "two ranks break": Case(breaks=((2, 2), (0, 1)), columns=HOOKED),
    "one rank breaks alone, no hook for it": Case(
        breaks=((2, 3),), columns=("fsdp1",), fails="left the loop while other ranks continue"
    ),
    "past the announced length": Case(announced=(1, 2, 3), modes=("planned",)),
    "short of the announced length": Case(announced=(5, 7, 9), modes=("planned",)),
    "announced even, is uneven": Case(announced=(4, 4, 4), modes=("planned",)),
    "accumulation, last group cut off": Case(accumulate=2, lengths=((1, 3, 5),), columns=HOOKED),
    "accumulation over three": Case(accumulate=3, sizes="mixed", columns=HOOKED),
    "accumulation, each rank's last batch reduced": Case(
        accumulate=2, sync_last=True, lengths=((3, 4, 6),), columns=("ddp", "fsdp2"), fails="JoinError|PeerFailedError"
    ),
    "statistics over all ranks": Case(net=("shared_norm",), sizes="mixed"),
    "... a rank without batches": Case(net=("shared_norm",), lengths=((0, 3, 5),)),
    "clipped gradients": Case(extras=frozenset({"clip"})),
    "schedule and EMA": Case(extras=frozenset({"schedule", "average"}), lengths=((2, 4, 6), (6, 4, 2))),
    "all-reduced loss": Case(extras=frozenset({"loss"}), sizes="mixed"),
    "all of these": Case(extras=BODY, net=("shared_norm",), sizes="mixed", lengths=((0, 3, 5), (4, 2, 0))),
    "two forwards, one backward": Case(forwards=2),
    "two models": Case(net=("mlp", "head")),
    "two models, one after the other": Case(net=("mlp", "mlp"), separate=True, sizes="mixed"),
    "evaluation inside": Case(extras=frozenset({"evaluate", "loss"})),
    "evaluation inside, statistics": Case(extras=frozenset({"evaluate"}), net=("shared_norm",)),
    "uneven evaluation inside": Case(extras=frozenset({"evaluate uneven"}), sizes="mixed"),
    "infinite gradients, then no data": Case(poisoned=True, extras=frozenset({"scaler", "loss"})),
    "buffers": Case(net=("norm",), lengths=((2, 4, 6), (6, 4, 2)), columns=("ddp", "zero"), average="world"),
    "buffers, a rank without batches": Case(net=("norm",), lengths=((0, 3, 5),), columns=("ddp", "zero")),
    "parameters resolve_source": Case(wrap={"find_unused_parameters": True}, columns=("ddp", "zero")),
    "weights kept after the forward": Case(wrap={"reshard_after_forward": False}, columns=("fsdp2",)),
    "pairs of ranks, uneven": Case(lengths=((2, 4),), columns=("tp",)),
    "pairs of ranks, one pair without batches": Case(lengths=((0, 3),), columns=("tp",), sizes="mixed"),
    "pairs of ranks, clipped, schedule, EMA, loss": Case(lengths=((3, 1), (2, 4)), columns=("tp",), extras=BODY),
}


class SharedNorm(nn.Module):
    """Normalizes by mean and variance over the samples of all ranks, as SyncBatchNorm does, forwards and backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = _sum_over_ranks(torch.tensor(float(len(x)), dtype=x.dtype))
        mean = _sum_over_ranks(x.sum(0)) / count
        variance = _sum_over_ranks((x - mean).square().sum(0)) / count
        return (x - mean) / (variance + 1e-3).sqrt()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    return _Sum.apply(x) if dist.is_initialized() else x


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
    "head": lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
    # No bias before a normalization: its gradient is rounding error only, which Adam would make steps of.
    "shared_norm": lambda: nn.Sequential(nn.Linear(4, 5, bias=False), SharedNorm(), nn.Tanh(), nn.Linear(5, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)),
}


def nets(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    return [NETS[name]().double() for name in case.net]


def samples(case: Case, rank: int, epoch: int, index: int) -> torch.Tensor:
    """A batch of a rank."""
    count = 1 + (3 * rank + 2 * index + epoch) % 5 if case.sizes == "mixed" else 3
    if case.net == ("norm",):
        count = max(count, 2)
    if case.loader == "torch" and index + 1 == case.lengths[epoch][rank]:
        count = 2
    x = batch(rank, epoch, index, count)
    if case.poisoned and rank == 0 and index + 1 == case.lengths[epoch][rank]:
        x[0, 0] = float("inf")
    return x


@dataclass
class Batches:
    """What a rank's loader gives in an epoch; its length may be wrong."""

    batches: Sequence[Any]
    announced: int | None

    def __len__(self) -> int:
        return len(self.batches) if self.announced is None else self.announced

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(case: Case, rank: int, epoch: int) -> Any:
    """A rank's loader."""
    batches = [samples(case, rank, epoch, index) for index in range(case.lengths[epoch][rank])]
    if case.loader == "stream":
        return iter(batches)
    if case.loader == "torch":
        return DataLoader(TensorDataset(torch.cat(batches)), batch_size=3, collate_fn=_collate)
    return Batches([pack(case, x) for x in batches], None if case.announced is None else case.announced[rank])


def _collate(rows: list[tuple[torch.Tensor]]) -> Any:
    return pack(Case(batch="nested"), torch.stack([row[0] for row in rows]))


def pack(case: Case, x: torch.Tensor) -> Any:
    """A batch of these samples."""
    if case.batch == "nested":
        return {"inputs": [{"x": x}, ["name"] * len(x)], "scale": 1.0}
    return x


def unpack(case: Case, batch: Any) -> torch.Tensor:
    """The samples of a batch."""
    if case.batch == "nested":
        (parts, names), scale = batch.pop("inputs"), batch["scale"]
        assert len(names) == len(parts["x"])
        return parts["x"] * scale
    return batch


FIXED = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
"""What is evaluated on."""


class Training:
    """The models, optimizers, schedules and averages of a loop, and the lines of it that are the same in any column."""

    def __init__(self, case: Case, column: Ddp, models: list[nn.Module]) -> None:
        self.case, self.column, self.models = case, column, models
        kind, options = OPTIMIZERS[case.optimizer]
        self.optimizers = [column.optimizer(model, kind, options) for model in models]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.optimizers]
        self.parameters = [param for model in models for param in model.parameters()]
        self.averages = [torch.zeros_like(param.detach()) for param in self.parameters]
        self.log: list[torch.Tensor] = []

    def chains(self) -> list[list[nn.Module]]:
        """The models that are applied one after another, before a backward of their own."""
        return [[model] for model in self.models] if self.case.separate else [self.models]

    def losses(self, x: torch.Tensor, chain: list[nn.Module] | None = None) -> torch.Tensor:
        """The loss of each sample."""
        total = torch.zeros(len(x), dtype=x.dtype)
        for models in self.chains() if chain is None else [chain]:
            for again in range(self.case.forwards):
                total = total + through(models, x / (again + 1)).square().sum(-1)
        return total

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def finish(self) -> None:
        """All that follows the last backward of a step, but logging."""
        if "scaler" in self.case.extras and not self._finite():
            return
        for model, optimizer, schedule in zip(self.models, self.optimizers, self.schedules, strict=True):
            if "clip" in self.case.extras:
                self.column.clip(model, 0.3)
            optimizer.step()
            if "schedule" in self.case.extras:
                schedule.step()
        if "average" in self.case.extras:
            for mean, param in zip(self.averages, self.parameters, strict=True):
                mean.lerp_(param.detach(), 0.1)

    def evaluate(self) -> None:
        """Log the sum of what the models make of :data:`FIXED`."""
        for model in self.models:
            model.eval()
        with torch.no_grad():
            self.log.append(self.losses(FIXED).sum())
        for model in self.models:
            model.train()

    def outcome(self) -> dict[str, Any]:
        """All that must be equal on every rank and in the single process."""
        result: dict[str, Any] = {"log": self.log, "lr": [torch.tensor(s.get_last_lr()) for s in self.schedules]}
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            result[f"params {i}"] = self.column.params(model)
            result[f"buffers {i}"] = self.column.buffers(model)
            result[f"state {i}"] = self.column.state(model, optimizer)
        if "average" in self.case.extras:
            write_values(self.parameters, self.averages)  # only a model's parameters can be put together from all ranks
            result["averages"] = [self.column.params(model) for model in self.models]
        return result

    def _finite(self) -> bool:
        grads = [param.grad for param in self.parameters if param.grad is not None]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        finite = torch.tensor(float(all(bool(grad.isfinite().all()) for grad in local)))
        if dist.is_initialized():
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)


def through(models: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Apply models."""
    for model in models:
        x = model(x)
    return x


def train(rank: int, world_size: int, case: Case, column: Ddp, mode: str) -> dict[str, Any]:
    """Run a case on ranks; ``data_index`` is the index in ``case.lengths`` of a rank's data."""
    data_index = rank // (world_size // case.world)
    training = Training(case, column, [column.wrap(net, **case.wrap) for net in nets(case)])
    every = range(len(case.lengths))
    for epochs in [every] if case.one_join else [[epoch] for epoch in every]:
        with stagereg.Join(
            [*training.models, *training.optimizers],
            mode=mode,
            average=case.average,
            timeout=LOCK_TIMEOUT_S,
            divide_by_initial_world_size=case.divide,
        ) as join:
            for epoch in epochs:
                run_epoch(training, join, data_index, epoch)
    return training.outcome()


def run_epoch(training: Training, join: Any, rank: int, epoch: int) -> None:
    """The loop."""
    case, column = training.case, training.column
    step = 0
    seen = 0
    for given in join.iterate(loader(case, rank, epoch)):
        x = unpack(case, given)
        if len(x):
            seen += 1
            if (rank, seen - 1) in case.skips:
                continue
        elif case.skips_empty:
            continue
        if step % case.accumulate == 0:
            training.zero()
        step += 1
        if step in case.guards:
            training.losses(x)
            continue
        sync = step % case.accumulate == 0 or (case.sync_last and step == case.lengths[epoch][rank])
        loss_sum, value = torch.zeros(2, dtype=x.dtype)
        for chain in training.chains():
            with contextlib.ExitStack() as gates:
                for model in training.models:
                    gates.enter_context(column.gate(model, sync))
                losses = training.losses(x, chain)
                loss = join.mean(losses.mean() * len(x) if case.means else losses.sum(), len(x))
                loss.backward()
            loss_sum += losses.detach().sum()
            value += loss.detach()
        if "loss" in case.extras:
            training.log += [mean_over_ranks(loss_sum, len(x)), mean_over_ranks(value, 1.0)]
        if sync:
            training.finish()
        if "evaluate" in case.extras and step % 2:
            training.evaluate()
        if step == case.stop or (rank, step) in case.breaks:
            break
    if "evaluate uneven" in case.extras:
        totals = torch.zeros(2, dtype=torch.float64)
        for x in join.iterate(loader(case, rank, epoch)):
            with torch.no_grad():
                totals += torch.stack([training.losses(x).sum(), torch.tensor(float(len(x)))])
        training.log.append(mean_over_ranks(totals[0], float(totals[1])))


def mean_over_ranks(total: torch.Tensor, count: float) -> torch.Tensor:
    """The mean over the samples of all ranks, of which this one has ``count``."""
    sums = torch.stack([total, torch.tensor(float(count), dtype=total.dtype)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


@functools.cache
def expected(case: Case) -> dict[str, Any]:
    """Run a case in this process."""
    training = Training(case, Ddp(), nets(case))
    buffers = [_buffers(training) for _ in range(case.world)]
    for epoch in range(len(case.lengths)):
        queues = [_queue(case, rank, epoch) for rank in range(case.world)]
        step = 0
        while active := [rank for rank, queue in enumerate(queues) if len(queue) > step]:
            if step % case.accumulate == 0:
                training.zero()
            if step + 1 in case.guards:
                step += 1
                continue
            batches = {rank: queues[rank][step] for rank in active}
            loss_sum, mean = _backward(training, batches, buffers)
            step += 1
            if "loss" in case.extras:
                training.log += [loss_sum / sum(map(len, batches.values())), mean]
            if step % case.accumulate == 0:
                training.finish()
            if "evaluate" in case.extras and step % 2:
                training.evaluate()
        if "evaluate uneven" in case.extras:
            with torch.no_grad():
                training.log.append(training.losses(torch.cat([x for queue in queues for x in queue])).mean())
        longest = max(map(len, queues))
        last = min(rank for rank, queue in enumerate(queues) if len(queue) == longest)
        buffers = [buffers[last]] * case.world
    _load(training, buffers[0])
    return training.outcome()


def _queue(case: Case, rank: int, epoch: int) -> list[torch.Tensor]:
    """The batches that a rank trains on."""
    indices = [i for i in range(case.lengths[epoch][rank]) if (rank, i) not in case.skips]
    ends = [case.stop, *(step for breaker, step in case.breaks if breaker == rank)]
    for end in ends:
        indices = indices[:end]
    return [samples(case, rank, epoch, index) for index in indices]


def _backward(
    training: Training, batches: dict[int, torch.Tensor], buffers: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a step's gradients up, from the batches of all ranks that have one; return the losses' sum, and their mean.

    All of them begin with the first one's buffers, and each makes its own of them.
    """
    counts = [len(x) for x in batches.values()]
    weights = _weights(training.case, counts)
    if "shared_norm" in training.case.net:
        sums = [losses.sum() for losses in training.losses(torch.cat(list(batches.values()))).split(counts)]
        mean = torch.stack([weight * each for weight, each in zip(weights, sums, strict=True)]).sum()
        mean.backward()
        return torch.stack(sums).sum().detach(), mean.detach()
    total, mean = torch.zeros(2, dtype=torch.float64)
    shared = buffers[min(batches)]
    for weight, (rank, x) in zip(weights, batches.items(), strict=True):
        _load(training, shared)
        loss_sum = training.losses(x).sum()
        (weight * loss_sum).backward()
        total += loss_sum.detach()
        mean += weight * loss_sum.detach()
        buffers[rank] = _buffers(training)
    return total, mean


def _weights(case: Case, counts: list[int]) -> list[float]:
    if case.average == "samples":
        return [1 / sum(counts)] * len(counts)
    return [1 / count / (case.world if case.average == "world" else len(counts)) for count in counts]


def _buffers(training: Training) -> list[torch.Tensor]:
    return [buffer.clone() for model in training.models for buffer in model.buffers()]


def _load(training: Training, values: list[torch.Tensor]) -> None:
    write_values([buffer for model in training.models for buffer in model.buffers()], values)


def in_column(column: str) -> list[str]:
    """The cases of a column."""
    return [name for name, case in CASES.items() if column in case.columns]


def has(mode: str, name: str) -> bool:
    """Whether a case is run when ``mode`` is asked for; those that choose theirs are run once, with the first."""
    return mode in CASES[name].modes or (mode == MODES[0] and not set(MODES) & set(CASES[name].modes))


def chosen(case: Case, mode: str) -> str:
    """The mode in which a case runs where ``mode`` is asked for."""
    return mode if mode in case.modes else case.modes[0]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two outcomes; infinite if there is anything in the first that is not finite."""
    leaves = [leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, torch.Tensor)]
    return difference(one, other) if all(bool(leaf.isfinite().all()) for leaf in leaves) else float("inf")


def run_cases(rank: int, world_size: int, column: str, names: Sequence[str], mode: str) -> dict[str, dict[str, Any]]:
    """Run cases one after another in the same ranks."""
    warnings.simplefilter("ignore", FutureWarning)  # FSDP1's state dicts
    ways = COLUMNS[column]()
    outcomes = {}
    for name in names:
        print(f"now comes the case {name!r}")  # the last output of a rank that dies
        try:
            outcomes[name] = train(rank, world_size, CASES[name], ways, chosen(CASES[name], mode))
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return outcomes


def fail(rank: int, world_size: int, column: str, name: str, mode: str) -> tuple[str, float]:
    """Run a case that has an error; return it, and the seconds from the beginning of the case to it."""
    started = time.monotonic()
    try:
        train(rank, world_size, CASES[name], COLUMNS[column](), chosen(CASES[name], mode))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", time.monotonic() - started


def ranks_of(column: str) -> int:
    """How many ranks a column trains on."""
    return 4 if column == "tp" else RANKS


QUICK = {("ddp", "planned")}
QUICK_ERRORS = {
    ("divided by active ranks, which it cannot", "fsdp1", "planned"),
    ("one rank breaks alone, no hook for it", "fsdp1", "planned"),
    ("accumulation, each rank's last batch reduced", "ddp", "counted"),
}
MUCH_S = 60.0
"""Seconds that a case may take on a busy machine, beside those that it waits for a rank."""


def slow_unless(quick: bool, *values: str) -> object:
    return pytest.param(*values, id="-".join(values), marks=[] if quick else [pytest.mark.slow])


RUNS = [slow_unless((column, mode) in QUICK, column, mode) for column in (*ALL, "tp") for mode in MODES]
ERRORS = [
    slow_unless((name, column, mode) in QUICK_ERRORS, column, mode, name)
    for column in (*ALL, "tp")
    for mode in MODES
    for name in in_column(column)
    if has(mode, name) and CASES[name].fails
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("column", "mode"), RUNS)
def test_every_case_has_the_numbers_of_a_single_process(column: str, mode: str) -> None:
    """One run of all cases, one after another in the same ranks."""
    names = [name for name in in_column(column) if has(mode, name) and not CASES[name].fails]
    outcomes = run_ranks(run_cases, ranks_of(column), args=(column, names, mode), timeout_s=20 + 2 * len(names))
    apart = {name: max(distance(outcome[name], expected(CASES[name])) for outcome in outcomes) for name in names}
    assert {name: value for name, value in apart.items() if not value < EXACT} == {}


@pytest.mark.parametrize(("column", "mode", "name"), ERRORS)
def test_what_cannot_be_joined_is_an_error_on_every_rank_in_time(column: str, mode: str, name: str) -> None:
    errors = run_ranks(fail, ranks_of(column), args=(column, name, mode), timeout_s=100)
    assert [error for error, _ in errors if not re.search(CASES[name].fails, error)] == []
    assert max(seconds for _, seconds in errors) < LOCK_TIMEOUT_S + MUCH_S
