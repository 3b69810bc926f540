"""What it costs a training step that lost ranks are noticed, and could be saved for: ``make bench-noticing``.

Several ranks train a DDP model with Adam. In the turns of the rows without a watch the pulse beside each rank is
stopped. The rows with a checkpointer call ``maybe_save`` in each step, and none is due: with the watch it notes each
step, so that those who are left could save it. Each row shows the time of a step on the slowest rank, and its
ratio to that of the row without anything *in the same round*.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg.bench.command as command
import stagereg.extensions.recovery.rank_failure as rank_failure
from stagereg.assembly import Checkpointer
from stagereg.base.rank_failures import responding
from stagereg.bench.measure import Series, interleave
from stagereg.bench.report import Group
from stagereg.extensions.recovery.launching import monitored
from stagereg.launch.rank import Rank
from stagereg.launch.run_store import RunStore
from tests.benchmarks import on_ranks, program
from tests.benchmarks.on_ranks import Turn

BASE = "off"
WATCH, CHECKPOINTER, BOTH, AGAIN = "watch", "checkpointer", "watch+checkpointer", f"again:{BASE}"
ROWS = [BASE, WATCH, CHECKPOINTER, BOTH, AGAIN]
_NOTICE_S, _STEPS, _NEVER = 10.0, 8, 10**9
MODELS = {"small": 128, "medium": 1024}  # their width; 33 thousand parameters, and 2.1 million


class NoticingTraining:
    """One rank's model, and a step of its training."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
        self.optimizer = torch.optim.Adam(self.ddp.parameters())
        self._batch = torch.randn(32, width)

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        self.optimizer.zero_grad()
        self.ddp(self._batch).square().mean().backward()
        self.optimizer.step()


class Noticing(Turn):
    """Some steps of one way: with the pulse running or not, and with a checkpointer or not."""

    def __init__(
        self, row: str, training: NoticingTraining, pulse: int, checkpointers: dict[str, Checkpointer]
    ) -> None:
        super().__init__(row)
        self._training, self._pulse, self._checkpointer = training, pulse, checkpointers.get(row)
        self._number = itertools.count(1)
        self._watched = row in (WATCH, BOTH)

    def turn(self) -> Iterator[float | None]:
        """Train for one block."""
        os.kill(self._pulse, signal.SIGCONT if self._watched else signal.SIGSTOP)
        self._step()
        dist.barrier()  # no rank times how much later another one begins
        yield None
        began = time.perf_counter()
        for _ in range(_STEPS):
            self._step()
        yield (time.perf_counter() - began) / _STEPS

    def _step(self) -> None:
        training = self._training
        training.step()
        if self._checkpointer is not None:
            state = {"model": training.ddp, "optimizer": training.optimizer}
            self._checkpointer.maybe_save(next(self._number), state)


def measure(rank: int, world: int, model: str, rows: Sequence[str], rounds: int, folder: Path) -> dict[str, Series]:
    """Measure rows, on a rank."""
    training, store = NoticingTraining(MODELS[model]), RunStore(dist.distributed_c10d._get_default_store(), rank, world)
    with ExitStack() as stack:
        options: dict[str, Any] = {"every": _NEVER, "resume": "never"}
        without = stack.enter_context(Checkpointer(folder / "without", **options))  # which has nothing to register at
        save = rank_failure.EmergencySave(store, rank, world, _NOTICE_S)
        stack.enter_context(monitored(Rank(rank, world, rank, world, False, store), save, print))
        stack.enter_context(responding(save))
        both = stack.enter_context(Checkpointer(folder / "with", **options))
        assert save.monitor is not None
        assert save.monitor._process is not None
        pulse = save.monitor._process.pid
        turns = [Noticing(row, training, pulse, {CHECKPOINTER: without, BOTH: both}) for row in rows]
        found = {one.row: one for one in interleave(turns, rounds)}
        os.kill(pulse, signal.SIGCONT)
    return found


def group(model: str, ranks: int, rows: Sequence[str], rounds: int, scale: float, folder: Path) -> Group:
    """Measure rows, and the one that they are held against, on fresh local ranks."""
    wanted = [row for row in ROWS if row in {*rows, BASE}]
    taken = on_ranks.measured("noticing", ranks, measure, model, wanted, rounds, folder)
    lines = [on_ranks.line(row, taken, BASE) for row in wanted]
    return Group(f"{model}/{ranks}", f"noticing {model}, {ranks} ranks: DDP", ["step ms", f"x {BASE}", "IQR"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="What it costs a training step that lost ranks are noticed.")
    command.add_options(parser, 120, lambda asked: ROWS, program.by_ranks(group), scale=None)
    parser.set_defaults(scale=1.0)
    program.add_ranks(parser, list(MODELS), "2")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
