"""What a training step costs in a join, beside torch's, on ranks that all have data: ``make bench-join``.

Each group is a model on a number of ranks, and its rows are ways to hold a join around the loop. A block opens a join,
takes one step to get going, and then the steps that are timed. Entering and leaving are timed by themselves: from the
construction of the join to the first batch, and from the end of the last step to the end of the join. The rows
``25 steps:...`` are blocks of so many steps, with entering and leaving. All ways train the same DDP model, in turns
that are the same on all ranks.

Each row shows the time of a step on the slowest rank, and its ratio to that of the row without a join *in the same
round*, for the machine changes from round to round. The rows ``enter+leave:...`` are held against the same step, and
blocks against a block.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import stagereg.bench.command as command
from stagereg.bench.measure import Series, interleave
from stagereg.bench.report import Group
from stagereg.join.context import Join
from tests.benchmarks import on_ranks, program
from tests.benchmarks.on_ranks import Taken, Turn

BASE = "off"  # the row without a join, which all others are held against
AGAIN = f"again:{BASE}"  # the same once more: its distance from the first is noise
ENTRY = "enter+leave:"  # before the name of a row, the row of entering and leaving such a join
WHOLE = "25 steps:"  # before the name of a row, the row of a step with its share of entering and leaving
WHOLE_STEPS = 25
_SETTLE = 4  # steps after which DDP has ordered its buckets

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A stack of linear layers, and how it is trained."""

    widths: tuple[int, ...]  # of the layers, from input to output
    batch: int  # samples a rank takes in one step
    steps: int  # timed in one block

    def make(self) -> nn.Module:
        """The same one on all ranks."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


MODELS = {"small": Model((64, 128, 128, 10), 32, 8), "medium": Model((512, 1024, 1024, 512), 32, 3)}
"""26 thousand parameters, and 2.1 million. Blocks are short, for a machine is only quiet for short."""


@dataclass(frozen=True)
class Way:
    """One way to hold a join around a loop."""

    mode: str | None = None
    throw: bool = False
    enable: bool = True
    torchs: bool = False  # torch's Join, which leaves itself switched on in the model, and the warning filters changed
    iterates: bool = False  # the batches come through join.iterate
    means: bool = False  # the loss is join.mean of a sum, not the mean over the rank's own samples

    @contextlib.contextmanager
    def join(self, ddp: Any, batches: Sequence[Batch]) -> Iterator[Any]:
        """Hold it."""
        if not self.torchs:
            loader = batches if self.enable and not self.iterates else None
            with Join([ddp], self.enable, self.throw, mode=self.mode, loader=loader) as ours:
                yield ours
            return
        before = ddp._join_config
        try:
            with warnings.catch_warnings(), TorchJoin([ddp], throw_on_early_termination=self.throw) as join:
                yield join
        finally:
            ddp._join_config = before


WAYS = {
    BASE: Way(enable=False),
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
    AGAIN: Way(enable=False),
}
"""By the names of their rows."""


WHOLE_ROWS = [f"{WHOLE}{row}" for row in (BASE, "torch:on", "iterate:counted", "iterate:planned", AGAIN)]


def row_names() -> list[str]:
    """The names of all rows there are."""
    return [*WAYS, *(f"{ENTRY}{row}" for row in WAYS), *WHOLE_ROWS]


# -- on the ranks


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


class JoinTurn(Turn):
    """One way, whose rows are a step, and entering and leaving."""

    def __init__(self, row: str, training: JoinTraining) -> None:
        super().__init__(row, f"{ENTRY}{row}")
        self._training = training

    def turn(self) -> Iterator[float | None]:
        """Train for one block."""
        yield None
        step, edges, _ = self._block(WAYS[self.rows[0]], self._training.steps + 1)
        yield from (step, edges)

    def _block(self, way: Way, steps: int) -> tuple[float, float, float]:
        """Seconds of one of the steps after the first, of entering and leaving the join, and of all."""
        training = self._training
        batches = [training.batch] * steps
        dist.barrier()  # no rank times how much later another one enters
        began = time.perf_counter()
        entered = first = last = began
        with way.join(training.ddp, batches) as join:
            feed: Iterable[Batch] = join.iterate(batches) if way.iterates else batches
            for number, batch in enumerate(feed):
                if number == 0:
                    entered = time.perf_counter()
                training.step(*batch, join if way.means else None)
                last = time.perf_counter()
                if number == 0:
                    first = last
        ended = time.perf_counter()
        return (last - first) / (steps - 1), entered - began + ended - last, ended - began


class WholeTurn(JoinTurn):
    """One way, whose row is a block with all that belongs to it."""

    def __init__(self, row: str, training: JoinTraining) -> None:
        super().__init__(row, training)
        self.rows = (row,)

    def turn(self) -> Iterator[float | None]:
        """Train for one block."""
        yield None
        yield self._block(WAYS[self.rows[0].removeprefix(WHOLE)], WHOLE_STEPS)[2] / WHOLE_STEPS


def measure(rank: int, world: int, model: str, rows: Sequence[str], rounds: int) -> dict[str, Series]:
    """Measure ``rows`` of :data:`WAYS` in turns; for :func:`stagereg.testing.run_ranks`."""
    training = JoinTraining(MODELS[model])
    turns = [(WholeTurn if row.startswith(WHOLE) else JoinTurn)(row, training) for row in rows]
    return {one.row: one for one in interleave(turns, rounds)}


# -- where it is asked for


def groups(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    """Measure ``rows``, and those that they are held against, on fresh local ranks."""
    wanted = dict.fromkeys(row.removeprefix(ENTRY) for row in rows)
    whole = [f"{WHOLE}{BASE}"] if any(row in WHOLE_ROWS for row in wanted) else []
    ordered = [*dict.fromkeys([BASE, *whole, *(row for row in wanted if row != AGAIN), AGAIN])]
    pairs = itertools.product(asked.models, asked.ranks)
    return [group(*pair, on_ranks.measured("join", pair[1], measure, pair[0], ordered, asked.rounds)) for pair in pairs]


def group(model: str, ranks: int, taken: Taken) -> Group:
    """Make the rows of a table from what the ranks measured."""
    ways = [row for row in taken[0] if row in WAYS]
    whole = [row for row in WHOLE_ROWS if row in taken[0]]
    lines = [on_ranks.line(row, taken, BASE) for row in [*ways, *(f"{ENTRY}{row}" for row in ways)]]
    lines += [on_ranks.line(row, taken, f"{WHOLE}{BASE}") for row in whole]
    parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(MODELS[model].widths))
    title = f"join {model}, {ranks} rank{'s' * (ranks > 1)}: DDP, {parameters:,} parameters"
    return Group(f"{model}/{ranks}", title, ["step ms", f"x {BASE}", "IQR"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="What a join costs a training step, with all ranks having data.")
    command.add_options(parser, 120, lambda asked: row_names(), groups, disk=False, scale=None)
    program.add_ranks(parser, list(MODELS), "2,4")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
