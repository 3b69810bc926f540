"""Restoring what several ranks hold alike, or have split: ``make bench-restore``.

A model and its Adam state, 300 MiB at full scale, are on every rank (``ddp``), or each has a shard of them (``fsdp2``).
A restore is timed out of the page cache into tensors that were zeroed, which are looked at afterwards. The time of a
round is that of the slowest rank, and is held against torch's way in the same round, and against all ranks filling the
same tensors with as many bytes of a file. Bytes are shares of the whole state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg.bench.command as command
from stagereg.assembly import Checkpointer
from stagereg.base.pages import view_of
from stagereg.bench.ceiling import ROW as CEILING
from stagereg.bench.measure import Series, interleave
from stagereg.bench.report import Group, Line, iqr, ms
from stagereg.bench.states import shrunk, tensors
from stagereg.registry import build
from tests.benchmarks import on_ranks, program
from tests.benchmarks.on_ranks import Taken, Turn
from tests.benchmarks.write import storages

MODELS = ("ddp", "fsdp2")
AGAIN = "again:"
_LOAD = "torch:load"
BASES = {"x torch": _LOAD, "x ceiling": CEILING}
"""The rows that the others are held against, by the head of the column."""

_WIDTH, _LAYERS = 1808, 8


def row_names() -> list[str]:
    return [CEILING, *storages(), _LOAD, AGAIN + _LOAD]


# -- on the ranks


class SplitTraining:
    """One rank's part of a model and its Adam state."""

    def __init__(self, model: str, scale: float) -> None:
        width = shrunk(_WIDTH, scale)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_LAYERS)))
        if model == "fsdp2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        given = DistributedDataParallel(self.model) if model == "ddp" else self.model
        self.given = {"model": given, "optimizer": self.optimizer}
        self.nbytes = sum(x.nbytes for x in tensors(self.tree()))  # of all ranks together, each replica once
        for number, x in enumerate(local(self.tree())):
            x.fill_(number)

    def tree(self) -> dict[str, Any]:
        """The state as one gives it to torch."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class SplitTurn(Turn):
    """One way to save and to restore such a model."""

    checkpointer: Checkpointer | None = None

    def __init__(self, row: str, training: SplitTraining, folder: Path, *rows: str) -> None:
        super().__init__(*rows)
        self.way, self.training, self.folder = row.removeprefix(AGAIN), training, folder
        self.step = 0

    def save(self) -> Callable[[], object]:
        """Save, and return what waits for its end."""
        self.step += 1
        if self.checkpointer is None:
            save(self.training.tree(), checkpoint_id=self.folder)
            return lambda: None
        self.checkpointer.save(self.step, self.training.given)
        return self.checkpointer.wait

    def begin(self, storage: str, **options: Any) -> None:
        if self.checkpointer is None:
            options["storage"] = build("storage", storage)
            self.checkpointer = Checkpointer(str(self.folder), every=1, keep=1, **options)

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()


class Restoring(SplitTurn):
    """One way to restore what was saved in the same way. Rows: the time, and the share that was read."""

    def __init__(self, row: str, training: SplitTraining, folder: Path) -> None:
        super().__init__(row, training, folder, row, f"{row}:read")

    def turn(self) -> Iterator[float | None]:
        if not self.step:
            if self.way in storages():
                self.begin(self.way)
            self.save()()
        for x in local(self.training.tree()):
            x.zero_()
        dist.barrier()
        before = moved("rchar")
        yield None
        self.restore()
        yield None
        yield (moved("rchar") - before) / self.training.nbytes
        if any(bool((x != number).any()) for number, x in enumerate(local(self.training.tree()))):
            raise ValueError("what was restored is not what was saved")

    def restore(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.restore(self.training.given)
        else:
            load(self.training.tree(), checkpoint_id=self.folder)


class PageCache(Restoring):
    """The ceiling: each rank fills its tensors out of a file, on one thread; of replicas all ranks out of the same."""

    def save(self) -> Callable[[], object]:
        self.step += 1
        parts = local(self.training.tree())
        split = nbytes(parts) < self.training.nbytes
        self._file = Path(f"{self.folder}.{dist.get_rank() if split else 0}")
        if split or dist.get_rank() == 0:
            self._file.write_bytes(b"".join(map(view_of, parts)))
        return lambda: None

    def restore(self) -> None:
        with self._file.open("rb", buffering=0) as file:
            for x in local(self.training.tree()):
                file.readinto(view_of(x))


def local(tree: Any) -> list[torch.Tensor]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors(tree)]


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in local(tree))


def moved(what: str) -> int:
    """Bytes that this process has read (``rchar``) or written (``wchar``) so far, page cache or not."""
    return int(Path("/proc/self/io").read_text().partition(f"{what}: ")[2].split()[0])


def measure(
    rank: int, world: int, model: str, rows: Sequence[str], rounds: int, scale: float, folder: Path
) -> dict[str, Series]:
    """Measure rows of :func:`row_names`; for :func:`stagereg.testing.run_ranks`."""
    training = SplitTraining(model, scale)
    kinds = {row: PageCache if row == CEILING else Restoring for row in rows}
    cases = [make(row, training, folder / str(number)) for number, (row, make) in enumerate(kinds.items())]
    return {one.row: one for one in interleave(cases, rounds)}


# -- where it is asked for


def group(model: str, ranks: int, rows: Sequence[str], rounds: int, scale: float, folder: Path) -> Group:
    """Measure rows, and those that they are held against, on fresh local ranks."""
    wanted = [row for row in row_names() if row in {*rows, *BASES.values()}]
    taken = on_ranks.measured("restore", ranks, measure, model, wanted, rounds, scale, folder)
    lines = [line(row, taken, BASES, shares=["read"]) for row in wanted]
    return Group(f"{model}/{ranks}", title("restore", model, ranks), ["median ms", "IQR ms", *BASES, "read"], lines)


def title(kind: str, model: str, ranks: int) -> str:
    return f"{kind} {model}, {ranks} rank{'s' * (ranks > 1)}"


def line(row: str, taken: Taken, bases: Mapping[str, str], shares: Sequence[str], times: Sequence[str] = ()) -> Line:
    """Make a row of a table from what the ranks measured: its time, ratios to others, other times, and shares."""
    if failure := on_ranks.failure(taken, row, *bases.values()):
        return Line(row, failure=failure)
    samples = {"seconds": on_ranks.slowest(taken, row)}
    samples |= {head: on_ranks.ratios(taken, row, base) for head, base in bases.items()}
    cells = [ms(statistics.median(samples["seconds"])), iqr(samples["seconds"], ms)]
    cells += [f"{statistics.median(samples[head]):.2f}" for head in bases]
    for what in times:
        samples[what] = on_ranks.slowest(taken, f"{row}:{what}")
        cells.append(ms(statistics.median(samples[what])))
    figures = {}
    for what in shares:
        figures[what] = [statistics.median(series[f"{row}:{what}"].samples) for series in taken]
        cells.append(" ".join(f"{share:.2f}" for share in figures[what]))
    return Line(row, cells, samples, figures)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="How long ranks restore, and what each reads, against the page cache.")
    command.add_options(parser, 9, lambda asked: row_names(), program.by_ranks(group))
    program.add_ranks(parser, MODELS, "1,2,4")
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
