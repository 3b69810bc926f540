"""``stagereg bench replicas`` and ``restore``: saving and restoring what several ranks hold alike, or have split.

A model and its Adam state, 300 MiB at full scale, are on every rank (``ddp``), or each has a shard of them (``fsdp2``).
A save is timed until it is committed; a restore out of the page cache into tensors that were zeroed, which are looked
at afterwards. The time of a round is that of the slowest rank, and is held against torch's way in the same round; that
of a restore also against all ranks filling the same tensors with as many bytes of a file. Bytes are shares of the
whole state.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import stagereg.bench.on_ranks as on_ranks
from stagereg.bench.ceiling import ROW as CEILING
from stagereg.bench.measure import Series, interleave
from stagereg.bench.on_ranks import Taken, Turn
from stagereg.bench.report import Group, Line, iqr, ms
from stagereg.bench.states import shrunk, tensors
from stagereg.bench.write import storages
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.options import Replicas
from stagereg.kernel.memory import view_of
from stagereg.registry import build
from stagereg.stagers.pinned_cached import PinnedCachedStager

MODELS = ("ddp", "fsdp2")
_SAVE, _ASYNC, _LOAD, _AGAIN = "torch:save", "torch:async_save", "torch:load", "again:"
_FIRST = "first:dcp"
BASES = {"replicas": {"x torch": _SAVE}, "restore": {"x torch": _LOAD, "x ceiling": CEILING}}
"""The rows that the others are held against, by kind and the head of the column."""

_SHARES = {"replicas": ("staged", "written"), "restore": ("read",)}
_WIDTH, _LAYERS = 1808, 8


def row_names(kind: str) -> list[str]:
    """The names of all rows there are."""
    if kind == "replicas":
        return [*storages(), _FIRST, _SAVE, _ASYNC, _AGAIN + _SAVE]
    return [CEILING, *storages(), _LOAD, _AGAIN + _LOAD]


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
        for number, x in enumerate(_local(self.tree())):
            x.fill_(number)

    def tree(self) -> dict[str, Any]:
        """The state as one gives it to torch."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class CountedStager(PinnedCachedStager):
    """Counts the bytes of the copy made last."""

    nbytes = 0

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copy, and count."""
        copy = super().stage(state_dict)
        self.nbytes = _nbytes(copy)
        return copy


class Saving(Turn):
    """One way to save. Rows: the time in the call, the time until it is committed, and shares staged and written."""

    _checkpointer: Checkpointer | None = None
    _step = 0

    def __init__(self, row: str, training: SplitTraining, folder: Path) -> None:
        super().__init__(f"{row}:blocked", row, f"{row}:staged", f"{row}:written")
        self.way, self.training, self.folder = row.removeprefix(_AGAIN), training, folder
        self._stager = CountedStager()

    def turn(self) -> Iterator[float | None]:
        """Save once more."""
        self._prepare()
        before = _moved("wchar")
        yield None
        wait = self._save()
        yield None
        wait()
        yield None
        # Torch's stager copies all that it is given.
        yield (_nbytes(self.training.tree()) if self.way == _ASYNC else self._stager.nbytes) / self.training.nbytes
        yield (_moved("wchar") - before) / self.training.nbytes

    def close(self) -> None:
        """Close the checkpointer."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _prepare(self) -> None:
        storage = self.way.removeprefix("first:")
        if storage not in storages() and dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif storage in storages() and self._checkpointer is None:
            parts = {"stager": self._stager, "storage": build("storage", storage)}
            share = Replicas(share=storage == self.way)
            self._checkpointer = Checkpointer(str(self.folder), every=1, keep=1, replicas=share, **parts)
        dist.barrier()

    def _save(self) -> Callable[[], object]:
        """Save, and return what waits for its end."""
        self._step += 1
        if self._checkpointer is not None:
            self._checkpointer.save(self._step, self.training.given)
            return self._checkpointer.wait
        future: Any = (async_save if self.way == _ASYNC else save)(self.training.tree(), checkpoint_id=self.folder)
        return future.result if self.way == _ASYNC else lambda: None


class Restoring(Saving):
    """One way to restore what was saved in the same way. Rows: the time, and the share that was read."""

    def __init__(self, row: str, training: SplitTraining, folder: Path) -> None:
        super().__init__(row, training, folder)
        self.rows = row, f"{row}:read"

    def turn(self) -> Iterator[float | None]:
        """Restore once more, into zeros."""
        if not self._step:
            self._prepare()
            self._save()()
        for x in _local(self.training.tree()):
            x.zero_()
        dist.barrier()
        before = _moved("rchar")
        yield None
        self._restore()
        yield None
        yield (_moved("rchar") - before) / self.training.nbytes
        if any(bool((x != number).any()) for number, x in enumerate(_local(self.training.tree()))):
            raise ValueError("what was restored is not what was saved")

    def _restore(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.restore(self.training.given)
        else:
            load(self.training.tree(), checkpoint_id=self.folder)


class PageCache(Restoring):
    """The ceiling: each rank fills its tensors out of a file, on one thread; of replicas all ranks out of the same."""

    def _save(self) -> Callable[[], object]:
        self._step += 1
        parts = _local(self.training.tree())
        split = _nbytes(parts) < self.training.nbytes
        self._file = Path(f"{self.folder}.{dist.get_rank() if split else 0}")
        if split or dist.get_rank() == 0:
            self._file.write_bytes(b"".join(map(view_of, parts)))
        return lambda: None

    def _restore(self) -> None:
        with self._file.open("rb", buffering=0) as file:
            for x in _local(self.training.tree()):
                file.readinto(view_of(x))


def _local(tree: Any) -> list[torch.Tensor]:
    """What this rank has of all tensors."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors(tree)]


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in _local(tree))


def _moved(what: str) -> int:
    """Bytes that this process has read (``rchar``) or written (``wchar``) so far, page cache or not."""
    return int(Path("/proc/self/io").read_text().partition(f"{what}: ")[2].split()[0])


def measure(
    rank: int, world: int, kind: str, model: str, rows: Sequence[str], rounds: int, scale: float, folder: Path
) -> dict[str, Series]:
    """Measure rows of :func:`row_names`; for :func:`stagereg.testing.run_ranks`."""
    training = SplitTraining(model, scale)
    kinds = {row: Saving if kind == "replicas" else PageCache if row == CEILING else Restoring for row in rows}
    cases = [make(row, training, folder / str(number)) for number, (row, make) in enumerate(kinds.items())]
    return {one.row: one for one in interleave(cases, rounds)}


# -- where it is asked for


def measured(
    kind: str, model: str, ranks: int, rows: Sequence[str], rounds: int, scale: float, folder: Path
) -> list[dict[str, Series]]:
    """Measure rows, and those that they are held against, on fresh local ranks; return what they found, by rank."""
    wanted = [row for row in row_names(kind) if row in {*rows, *BASES[kind].values()}]
    return on_ranks.measured(kind, ranks, measure, kind, model, wanted, rounds, scale, folder)


def group(kind: str, model: str, ranks: int, taken: Taken) -> Group:
    """Make the rows of a table from what the ranks measured."""
    lines = [_line(kind, row, taken) for row in row_names(kind) if row in taken[0]]
    more = ["blocked ms", *_SHARES[kind]] if kind == "replicas" else _SHARES[kind]
    title = f"{kind} {model}, {ranks} rank{'s' * (ranks > 1)}"
    return Group(f"{model}/{ranks}", title, ["median ms", "IQR ms", *BASES[kind], *more], lines)


def _line(kind: str, row: str, taken: Taken) -> Line:
    bases = BASES[kind]
    if failure := on_ranks.failure(taken, row, *bases.values()):
        return Line(row, failure=failure)
    samples = {"seconds": on_ranks.slowest(taken, row)}
    samples |= {head: on_ranks.ratios(taken, row, base) for head, base in bases.items()}
    cells = [ms(statistics.median(samples["seconds"])), iqr(samples["seconds"], ms)]
    cells += [f"{statistics.median(samples[head]):.2f}" for head in bases]
    if kind == "replicas":
        samples["blocked"] = on_ranks.slowest(taken, f"{row}:blocked")
        cells.append(ms(statistics.median(samples["blocked"])))
    shares = {}
    for what in _SHARES[kind]:
        shares[what] = [statistics.median(series[f"{row}:{what}"].samples) for series in taken]
        cells.append(" ".join(f"{share:.2f}" for share in shares[what]))
    return Line(row, cells, samples, shares)
