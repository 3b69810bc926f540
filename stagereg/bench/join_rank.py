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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from stagereg.bench.measure import Case, Series, Stopwatch, interleave
from stagereg.errors import JoinError
from stagereg.join.context import Join
from stagereg.testing.scenario import begun_collectives

__all__ = ["ENTRY", "MODELS", "WAYS", "Model", "Taken", "TrafficCounter", "Way", "measure"]

ENTRY = "enter+leave:"
"""Before the name of a row, the row of entering and leaving such a join."""

_SETTLE = 4  # steps after which DDP has ordered its buckets
_CALLS = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "barrier")

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
        mode: of stagereg's ``Join``.
        throw: whether it throws on early termination.
        enable: whether it is on.
        torchs: whether it is torch's, which leaves itself switched on in the model, and the warning filters changed.
        iterates: whether the batches come through ``join.iterate``.
        means: whether the loss is ``join.mean`` of a sum, or the mean over the rank's own samples.
    """

    mode: str | None = None
    throw: bool = False
    enable: bool = True
    torchs: bool = False
    iterates: bool = False
    means: bool = False

    @contextlib.contextmanager
    def join(self, ddp: Any, batches: Sequence[Batch]) -> Iterator[Any]:
        """Hold it."""
        before = ddp._join_config
        if self.torchs:
            try:
                with warnings.catch_warnings(), TorchJoin([ddp], throw_on_early_termination=self.throw) as join:
                    yield join
            finally:
                ddp._join_config = before
        elif not self.enable:
            with Join([ddp], enable=False) as ours:
                yield ours
        else:
            loader = None if self.iterates else batches
            with Join([ddp], throw_on_early_termination=self.throw, mode=self.mode, loader=loader) as ours:
                yield ours


WAYS = {
    "off": Way(enable=False),
    "torch:on": Way(torchs=True),
    "torch:throw": Way(torchs=True, throw=True),
    "torch_wire": Way("torch"),
    "torch_wire+throw": Way("torch", throw=True),
    "counted": Way("counted"),
    "counted+throw": Way("counted", throw=True),
    "planned": Way("planned"),
    "planned+throw": Way("planned", throw=True),
    "iterate:counted": Way("counted", iterates=True),
    "iterate:planned": Way("planned", iterates=True),
    "iterate+mean:counted": Way("counted", iterates=True, means=True),
    "iterate+mean:planned": Way("planned", iterates=True, means=True),
    "again:off": Way(enable=False),
}
"""By the names of their rows."""


class TrafficCounter:
    """Counts the collectives that this process begins, in whatever group, between ``start`` and ``stop``.

    Attributes:
        collectives: begun.
        blocking: of those, how many their caller waited for in the call.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.collectives = 0
        self.blocking = 0
        self._calls = _CALLS if enabled else ()
        self._patches = contextlib.ExitStack()

    def start(self) -> None:
        """Begin to count."""
        for name in self._calls:
            call = self._observing(getattr(dist, name))
            for place in (dist, distributed_c10d):
                self._patches.enter_context(mock.patch.object(place, name, call))
        self.collectives = -begun_collectives()

    def stop(self) -> None:
        """Count no more."""
        self.collectives += begun_collectives()
        self._patches.close()

    def _observing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            self.blocking += work is None  # otherwise there is something to wait for later
            return work

        return observed


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

    def block(self, way: Way, counter: TrafficCounter) -> tuple[float, float]:
        """Train for one block in a join of its own, and count what all its steps but the first begin.

        Returns:
            Seconds of one of these steps, and of entering and leaving the join.
        """
        batches = [self.batch] * (self.steps + 1)
        dist.barrier()  # no rank times how much later another one enters
        began = time.perf_counter()
        entered = first = last = began
        with way.join(self.ddp, batches) as join:
            feed: Iterable[Batch] = join.iterate(batches) if way.iterates else batches
            for number, (x, y) in enumerate(feed):
                if number == 0:
                    entered = time.perf_counter()
                self.step(x, y, join if way.means else None)
                if number == 0:
                    counter.start()
                    first = time.perf_counter()
                elif number == self.steps:
                    last = time.perf_counter()
                    counter.stop()
        return (last - first) / self.steps, entered - began + time.perf_counter() - last


class Turn(Case):
    """One way, whose rows are a step, and entering and leaving.

    Attributes:
        counts: of collectives that one step begins: all, and those of them that block.
    """

    def __init__(self, row: str, training: JoinTraining) -> None:
        super().__init__(row, f"{ENTRY}{row}")
        self.counts: tuple[float, float] | None = None
        self._training = training

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Train for one block; the first time only counts. Raises ``JoinError`` on all ranks if one of them fails."""
        counter = TrafficCounter(enabled=self.counts is None)
        seconds, mine = (0.0, 0.0), ""
        try:
            seconds = self._training.block(WAYS[self.rows[0]], counter)
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"
        for rank, text in enumerate(_gathered(mine)):
            if text:
                raise JoinError(f"rank {rank}: {text}")
        if self.counts is None:
            self.counts = counter.collectives / self._training.steps, counter.blocking / self._training.steps
        return dict(zip(self.rows, seconds, strict=True))


Taken = tuple[dict[str, Series], dict[str, tuple[float, float] | None]]
"""What one rank has measured: by row the seconds, and :attr:`Turn.counts`."""


def measure(rank: int, world: int, model: str, rows: Sequence[str], rounds: int) -> Taken:
    """Measure ``rows`` in turns; for :func:`stagereg.testing.run_ranks`.

    Args:
        model: its name in :data:`MODELS`.
        rows: names of :data:`WAYS`.
        rounds: that count.

    Raises:
        JoinError: the ranks ended with different parameters.
    """
    training = JoinTraining(MODELS[model])
    cases = [Turn(row, training) for row in rows]
    taken = interleave(cases, rounds, Stopwatch(), trim=False, shuffle=True)
    digests = _gathered(sum(param.detach().double().abs().sum().item() for param in training.ddp.parameters()))
    if len(set(digests)) > 1:
        raise JoinError(f"The ranks have drifted apart: the sums of their parameters are {digests}.")
    return {one.row: one for one in taken}, {case.rows[0]: case.counts for case in cases}


def _gathered(mine: Any) -> list[Any]:
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said
