"""``stagereg bench stall``: how much training time a checkpoint costs.

The benchmark trains a transformer on random tokens; weights and Adam state are 168 MiB at full scale. A segment is one
checkpoint, four steps, and the wait until the checkpoint is durable. The lost time is the time of a segment minus that
of four steps without a checkpoint. These four steps run before the segment in one round, and after it in the next, so
that a drift of the machine's speed has no effect. Each round measures every way to save, and no save at all (the A/A
row, which shows the noise). Each number of torch threads has one group, which is measured in a separate process.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from stagereg.bench.ceiling import flush
from stagereg.bench.measure import Case, Series, in_own_process, interleave, quiet, standard_error
from stagereg.bench.report import Group, Line, iqr, ms
from stagereg.registry import build

BASE = "none"
"""Name of the A/A row, which compares steps without a checkpoint with each other."""

_TORCHS = ("torch:async_save", "torch:process")
_STAGERS = ("blocking", "pinned_cached", "overlapped")
_STORAGES = ("dcp", "torch_dcp")


class StallTraining:
    """The transformer to train, its Adam optimizer, and one training step."""

    STEPS = 4
    """Number of steps in a segment."""

    _WORDS, _WIDTH, _HEADS, _LAYERS = 512, 384, 8, 8
    _BATCH, _LENGTH = 2, 64

    def __init__(self, scale: float, device: str) -> None:
        self.settle = torch.cuda.synchronize if device != "cpu" else lambda: None
        torch.manual_seed(0)
        width = self._HEADS * max(1, round(self._WIDTH * math.sqrt(scale) / self._HEADS))
        sizes = width, self._HEADS, 4 * width
        layers = [torch.nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True) for _ in range(self._LAYERS)]
        ends = torch.nn.Embedding(self._WORDS, width), torch.nn.Linear(width, self._WORDS)
        self.model = torch.nn.Sequential(ends[0], *layers, ends[1]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(self._WORDS, (self._BATCH, self._LENGTH + 1), device=device)

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def segment(self) -> None:
        for _ in range(self.STEPS):
            self.step()
        self.settle()


class Segment(Case):
    """Measures four steps without a checkpoint, and a segment with one. This base class does not save anything.

    Rows: the time of the four steps without a checkpoint, the time in ``save``, and the time of the segment.
    """

    def __init__(self, row: str, training: StallTraining, folder: Path) -> None:
        super().__init__(f"{row}:alone", f"{row}:blocked", row)
        self.training = training
        self.folder = folder
        self._turns = 0

    def turn(self) -> Iterator[float | None]:
        """Train with and without a checkpoint. An untimed step in between separates the two measurements."""
        self.prepare()
        self._turns += 1
        self._rest()
        yield None
        alone = self._alone() if self._turns % 2 else None
        began = time.perf_counter()
        wait = self.save()
        blocked = time.perf_counter() - began
        self.training.segment()
        wait()
        whole = time.perf_counter() - began
        if alone is None:
            self._rest()
            alone = self._alone()
        yield from (alone, blocked, whole)

    def _rest(self) -> None:
        self.training.step()
        self.training.settle()

    def _alone(self) -> float:
        began = time.perf_counter()
        self.training.segment()
        return time.perf_counter() - began

    def prepare(self) -> None:
        """Prepare for a save, for example delete old files. Not timed."""

    def save(self) -> Callable[[], None]:
        """Start a save. Return a function that waits until the checkpoint is durable."""
        return lambda: None


class TorchAsyncSave(Segment):
    """Saves with torch's ``async_save``: with default options, or with a writer process and a shared-memory stager."""

    _stager: DefaultStager | None = None

    def prepare(self) -> None:
        for old in self.folder.iterdir():
            shutil.rmtree(old)

    def save(self) -> Callable[[], None]:
        """Start ``async_save``. Return a function that waits for the save and then flushes the files."""
        options: dict[str, Any] = {}
        if self.rows[-1] == "torch:process":
            self._stager = self._stager or DefaultStager(StagingOptions(False, True, False, False))
            options = {"async_stager": self._stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        target = Path(tempfile.mkdtemp(dir=self.folder))
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        future: Any = async_save(state, checkpoint_id=target, **options)

        def wait() -> None:
            future.result()
            flush(target)

        return wait

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Checkpoints(Segment):
    """Saves with stagereg's checkpointer; the name of the row contains the stager and the storage."""

    _checkpointer: Any = None
    _step = 0

    def prepare(self) -> None:
        if self._checkpointer is None:
            stager, storage = self.rows[-1].split("+")
            parts = {"stager": build("stager", stager), "storage": build("storage", storage)}
            self._checkpointer = build("checkpoint", "default", dir=str(self.folder), every=1, keep=1, **parts)

    def save(self) -> Callable[[], None]:
        self._step += 1
        self._checkpointer.save(self._step, {"model": self.training.model, "optimizer": self.training.optimizer})
        wait: Callable[[], None] = self._checkpointer.wait
        return wait

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


def row_names() -> list[str]:
    return [BASE, *_TORCHS, *(f"{stager}+{storage}" for stager in _STAGERS for storage in _STORAGES)]


def measured(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    """Measure ``rows`` in a new process with ``threads`` torch threads. ``folder`` must be empty.

    Raises: ``LaunchError`` if the process failed.
    """
    # Set MASTER_ADDR, because torch's writer process would otherwise use the host name, which may not resolve.
    environment = {"OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1"}
    return in_own_process(_train, rows, rounds, threads, scale, device, folder, **environment)


def _train(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = StallTraining(scale, device)
    cases = []
    for row in rows:
        kind = Segment if row == BASE else TorchAsyncSave if row in _TORCHS else Checkpoints
        cases.append(kind(row, training, Path(tempfile.mkdtemp(dir=folder))))
    try:
        with quiet():
            return interleave(cases, rounds, training.settle, what=f"stall, {threads} torch threads")
    finally:
        dist.destroy_process_group()


def group(name: str, title: str, series: Sequence[Series]) -> Group:
    """Build a group of rows from the samples of all cases: the lost time, and the time in ``save``."""
    by_row = {one.row: one for one in series}
    lines: list[Line] = []
    for one in series:
        if one.row.endswith((":alone", ":blocked")):
            continue
        if not one.samples:
            lines.append(Line(one.row, failure=one.failure))
            continue
        alone, blocked = by_row[f"{one.row}:alone"].samples, by_row[f"{one.row}:blocked"].samples
        lost = [mine - without for mine, without in zip(one.samples, alone, strict=True)]
        samples = {"lost": lost, "blocked": blocked, "segment": one.samples, "alone": alone}
        middle, step = statistics.median(lost), statistics.median(alone) / StallTraining.STEPS
        figures = [ms(x) for x in (statistics.median(blocked), middle, standard_error(lost))]
        cells = [*figures, iqr(lost, ms), f"{middle / step:.2f}"]
        lines.append(Line(one.row, cells, samples, {"step": step}))
    return Group(name, title, ["blocked ms", "lost ms", "± ms", "IQR ms", "lost steps"], lines)
