"""What a rank of ``stagereg bench join`` runs: one DDP model, trained in turns in every way a join can be held.

A block opens a join, takes one step to get going, and then the steps that are timed. Entering and leaving are timed by
themselves: from the construction of the join to the first batch, and from the end of the last step to the end of the
join.

All ways train the same model, so that no way has luckier memory than another. They take their turns in the same order
on all ranks, which is another one in each round. A way that fails is left out from then on. In the end the ranks must
still have the same parameters, or nothing was worth measuring.

In the first round, which only warms up, the collectives between the first step and the last are counted: every one that
this process begins, by the sequence numbers of its process groups, and among them those that hold up the Python code
that began them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from stagereg.errors import StageregError
from stagereg.join.context import Join
from stagereg.kernel.channel import resources_of

__all__ = ["MODELS", "WAYS", "Model", "Taken", "TrafficCounter", "Way", "measure", "turns"]

_SETTLE = 4  # steps after which DDP has ordered its buckets

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A stack of linear layers, and how it is trained.

    Attributes:
        widths: of the layers, from input to output.
        batch: samples a rank takes in one step.
        steps: timed in one block.
    """

    widths: tuple[int, ...]
    batch: int
    steps: int

    def make(self) -> nn.Module:
        """The same one on all ranks."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.widths[:-1], self.widths[1:], strict=True):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(a * b + b for a, b in zip(self.widths[:-1], self.widths[1:], strict=True))


MODELS = {"small": Model((64, 128, 128, 10), 32, 8), "medium": Model((512, 1024, 1024, 512), 32, 3)}
"""26 thousand parameters, and 2.1 million. Blocks are short, for a machine is only quiet for short."""


@dataclass(frozen=True)
class Way:
    """One way to hold a join around a loop.

    Attributes:
        join: makes the context, from the model and the batches.
        iterates: whether the batches come through ``join.iterate``.
        means: whether the loss is ``join.mean`` of a sum, or the mean over the rank's own samples.
    """

    join: Callable[[Any, Sequence[Batch]], contextlib.AbstractContextManager[Any]]
    iterates: bool = False
    means: bool = False


def _ours(
    mode: str | None = None, throw: bool = False, enable: bool = True, iterates: bool = False
) -> Callable[[Any, Sequence[Batch]], contextlib.AbstractContextManager[Any]]:
    def make(ddp: Any, batches: Sequence[Batch]) -> contextlib.AbstractContextManager[Any]:
        if not enable:
            return Join([ddp], enable=False)
        return Join([ddp], throw_on_early_termination=throw, mode=mode, loader=None if iterates else batches)

    return make


@contextlib.contextmanager
def _torchs(ddp: Any, batches: Sequence[Batch], throw: bool = False) -> Iterator[None]:
    """torch's join, which leaves itself switched on in the model, and the warning filters changed."""
    before = ddp._join_config
    try:
        with warnings.catch_warnings(), TorchJoin([ddp], throw_on_early_termination=throw):
            yield
    finally:
        ddp._join_config = before


WAYS = {
    "off": Way(_ours(enable=False)),
    "torch:on": Way(_torchs),
    "torch:throw": Way(functools.partial(_torchs, throw=True)),
    "torch_wire": Way(_ours("torch")),
    "torch_wire+throw": Way(_ours("torch", throw=True)),
    "counted": Way(_ours("counted")),
    "counted+throw": Way(_ours("counted", throw=True)),
    "planned": Way(_ours("planned")),
    "planned+throw": Way(_ours("planned", throw=True)),
    "iterate:counted": Way(_ours("counted", iterates=True), iterates=True),
    "iterate:planned": Way(_ours("planned", iterates=True), iterates=True),
    "iterate+mean:counted": Way(_ours("counted", iterates=True), iterates=True, means=True),
    "iterate+mean:planned": Way(_ours("planned", iterates=True), iterates=True, means=True),
    "again:off": Way(_ours(enable=False)),
}
"""By the names of their rows."""


@dataclass
class Taken:
    """What one row has come to on one rank.

    Attributes:
        seconds: of one step, one figure for each round in order.
        entry_seconds: of entering and leaving the join, likewise.
        collectives: begun by one step.
        blocking: of those, how many the Python code that began them waited for in the same call.
        failure: what went wrong, on this rank or another.
    """

    seconds: list[float] = field(default_factory=list)
    collectives: float = 0.0
    blocking: float = 0.0
    entry_seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def note(self, meter: Clock | TrafficCounter, steps: int) -> None:
        """Take down what ``meter`` has measured in so many steps."""
        if isinstance(meter, Clock):
            self.seconds.append(meter.seconds / steps)
            self.entry_seconds.append(meter.around)
        else:
            self.collectives = meter.collectives / steps
            self.blocking = meter.blocking / steps


class TrafficCounter:
    """Counts the collectives that this process begins, in whatever group, between ``start`` and ``stop``.

    Attributes:
        collectives: begun.
        blocking: of those, how many their caller waited for in the call.
    """

    _CALLS = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "barrier")

    def __init__(self) -> None:
        self.collectives = 0
        self.blocking = 0
        self._before = 0
        self._patches = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to count."""
        for name in self._CALLS:
            call = self._observing(getattr(dist, name))
            for place in (dist, distributed_c10d):
                self._patches.enter_context(mock.patch.object(place, name, call))
        self._before = self._begun()

    def stop(self) -> None:
        """Count no more."""
        self.collectives = self._begun() - self._before
        self._patches.close()

    def _observing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            self.blocking += work is None  # otherwise there is something to wait for later
            return work

        return observed

    @staticmethod
    def _begun() -> int:
        groups = list(distributed_c10d._world.pg_map)
        channels = [backend for group in groups for backend in resources_of(group).backends()]
        return sum(each._get_sequence_number_for_group() for each in [*groups, *channels])


class Clock:
    """Times what is between ``start`` and ``stop``, in seconds.

    Attributes:
        around: seconds of entering and leaving the join, as the block has measured them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.around = 0.0

    def start(self) -> None:
        """Look at the clock."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Look again."""
        self.seconds = time.perf_counter() - self._started


class JoinTraining:
    """One rank's model, and a few steps of its training."""

    def __init__(self, model: Model) -> None:
        self.steps = model.steps
        self.ddp = DistributedDataParallel(model.make())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.batch = torch.randn(model.batch, model.widths[0]), torch.randn(model.batch, model.widths[-1])
        for _ in range(_SETTLE):
            self.step(*self.batch)

    def step(self, x: Tensor, y: Tensor, join: Any = None) -> None:
        """One step, whose loss is a mean over this rank's samples, or what ``join`` makes of their sum."""
        self.optimizer.zero_grad()
        output = self.ddp(x)
        loss = mse_loss(output, y) if join is None else join.mean(mse_loss(output, y, reduction="sum"), len(x))
        loss.backward()
        self.optimizer.step()

    def block(self, way: Way, meter: Clock | TrafficCounter) -> None:
        """Train for one block in a join of its own; ``meter`` measures all steps but the first."""
        batches = [self.batch] * (self.steps + 1)
        dist.barrier()  # no rank times how much later another one enters
        began = time.perf_counter()
        entered = last = began
        with way.join(self.ddp, batches) as join:
            feed: Iterable[Batch] = join.iterate(batches) if way.iterates else batches
            for number, (x, y) in enumerate(feed):
                if number == 0:
                    entered = time.perf_counter()
                self.step(x, y, join if way.means else None)
                if number == 0:
                    meter.start()
                elif number == self.steps:
                    meter.stop()
                    last = time.perf_counter()
        if isinstance(meter, Clock):
            meter.around = entered - began + time.perf_counter() - last


def measure(rank: int, world: int, model: str, rows: Sequence[str], rounds: int) -> dict[str, Taken]:
    """Measure ``rows`` in turns; for :func:`stagereg.testing.run_ranks`.

    Args:
        model: its name in :data:`MODELS`.
        rows: names of :data:`WAYS`.
        rounds: that count.

    Returns:
        What each row has come to on this rank.

    Raises:
        StageregError: the ranks ended with different parameters.
    """
    training = JoinTraining(MODELS[model])
    taken = {row: Taken() for row in rows}
    for number in range(rounds + 1):
        gc.collect()
        for row in turns([row for row in rows if not taken[row].failure], number):
            gc.collect(1)
            meter = Clock() if number else TrafficCounter()
            taken[row].failure = _together(functools.partial(training.block, WAYS[row], meter), world)
            taken[row].note(meter, training.steps)
    digests = _gathered(sum(param.detach().double().abs().sum().item() for param in training.ddp.parameters()), world)
    if len(set(digests)) > 1:
        raise StageregError(f"The ranks have drifted apart: the sums of their parameters are {digests}.")
    return taken


def turns(rows: Sequence[str], number: int) -> list[str]:
    """The order of ``rows`` in a round: the same on all ranks, and another in each round."""
    ordered = list(rows)
    random.Random(number).shuffle(ordered)
    return ordered


def _together(action: Callable[[], None], world: int) -> str:
    """Do it, and return on all ranks what went wrong on the first where something did; empty if nothing."""
    mine = ""
    try:
        action()
    except Exception as error:
        mine = f"{type(error).__name__}: {error}"
    return next((f"rank {rank}: {text}" for rank, text in enumerate(_gathered(mine, world)) if text), "")


def _gathered(mine: Any, world: int) -> list[Any]:
    said = [None] * world
    dist.all_gather_object(said, mine)
    return said
