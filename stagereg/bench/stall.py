"""``stagereg bench stall``: what a checkpoint costs the training it interrupts.

A transformer whose weights and Adam state are 168 MiB at full scale is trained on made-up tokens. A segment is one
checkpoint, four steps, and waiting until the checkpoint is durable; each round has one segment for every way of saving,
and one without a checkpoint. *Lost* is a segment less the segment without a checkpoint of the same round. One group a
number of torch threads, each measured in a process of its own, since that number is best set when a process starts.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from stagereg.bench.ceiling import flush
from stagereg.bench.measure import Case, Series, in_own_process, interleave, quiet
from stagereg.bench.report import Group, Line, iqr, ms
from stagereg.registry import build

__all__ = ["BASE", "StallTraining", "group", "measured", "row_names"]

BASE = "none"
"""The row without a checkpoint, which all others are held against."""

_TORCHS = ("torch:async_save", "torch:process")
_STAGERS = ("blocking", "pinned_cached", "overlapped", "shared")
_STORAGES = ("dcp", "torch_dcp")


class StallTraining:
    """A transformer with Adam, and one step of its training."""

    STEPS = 4
    """Steps of one segment."""

    _WORDS, _WIDTH, _HEADS, _LAYERS = 512, 384, 8, 8
    _BATCH, _LENGTH = 2, 64

    def __init__(self, scale: float, device: str) -> None:
        torch.manual_seed(0)
        width = self._HEADS * max(1, round(self._WIDTH * math.sqrt(scale) / self._HEADS))
        layers = [
            torch.nn.TransformerEncoderLayer(width, self._HEADS, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(self._LAYERS)
        ]
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(self._WORDS, width), *layers, torch.nn.Linear(width, self._WORDS)
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(self._WORDS, (self._BATCH, self._LENGTH + 1), device=device)

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        logits = self.model(self._tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def segment(self) -> None:
        """The steps of one segment."""
        for _ in range(self.STEPS):
            self.step()


class Segment(Case):
    """One checkpoint and the steps that it may disturb. Rows: of the segment the time in the call, and the segment."""

    def __init__(self, row: str, training: StallTraining, folder: Path) -> None:
        super().__init__(f"{row}:blocked", row)
        self.training = training
        self.folder = folder

    def turn(self) -> Iterator[None]:
        """Train without a checkpoint. In every way, what the last segment left behind falls on a step before it."""
        self.training.step()
        yield
        yield
        self.training.segment()
        yield


class TorchAsyncSave(Segment):
    """torch's ``async_save`` as it is, or with a process that writes and a kept stager in shared memory."""

    _stager: DefaultStager | None = None

    def turn(self) -> Iterator[None]:
        """Wait for the writer, then flush what it has not."""
        options: dict[str, Any] = {}
        if self.rows[1] == "torch:process":
            self._stager = self._stager or DefaultStager(StagingOptions(False, True, False, False))
            options = {"async_stager": self._stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        for old in self.folder.iterdir():
            shutil.rmtree(old)
        target = Path(tempfile.mkdtemp(dir=self.folder))
        self.training.step()
        yield
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        future: Any = async_save(state, checkpoint_id=target, **options)
        yield
        self.training.segment()
        future.result()
        flush(target)
        yield

    def close(self) -> None:
        """Close the kept stager."""
        if self._stager is not None:
            self._stager.close()


class Checkpoints(Segment):
    """The project's checkpointer with one stager and one storage."""

    _checkpointer: Any = None
    _step = 0

    def turn(self) -> Iterator[None]:
        """Wait until the checkpoint is committed."""
        if self._checkpointer is None:
            stager, storage = self.rows[1].split("+")
            parts = {"stager": build("stager", stager), "storage": build("storage", storage)}
            self._checkpointer = build("checkpoint", "default", dir=str(self.folder), every=1, keep=1, **parts)
        self._step += 1
        self.training.step()
        yield
        self._checkpointer.save(self._step, {"model": self.training.model, "optimizer": self.training.optimizer})
        yield
        self.training.segment()
        self._checkpointer.wait()
        yield

    def close(self) -> None:
        """Close it, and the stager with it."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def row_names() -> list[str]:
    """The names of all rows there are."""
    ours = [f"{stager}+{storage}" for stager in _STAGERS for storage in _STORAGES]
    return [BASE, *_TORCHS, *ours, f"again:{BASE}"]


def measured(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    """Measure :func:`row_names` in a process of its own with so many torch threads; ``folder`` is empty.

    Raises:
        LaunchError: that process ended before it was done.
    """
    # torch's save process asks for the machine's name otherwise, which need not lead anywhere.
    environment = {"OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1"}
    return in_own_process(_train, rows, rounds, threads, scale, device, folder, **environment)


def _train(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = StallTraining(scale, device)
    cases = []
    for row in rows:
        kind = Segment if row.endswith(BASE) else TorchAsyncSave if row in _TORCHS else Checkpoints
        cases.append(kind(row, training, Path(tempfile.mkdtemp(dir=folder))))
    settle = torch.cuda.synchronize if device != "cpu" else lambda: None
    try:
        with quiet():
            return interleave(cases, rounds, settle, what=f"stall, {threads} torch threads")
    finally:
        dist.destroy_process_group()


def group(name: str, title: str, series: Sequence[Series]) -> Group:
    """Make the rows of a table from what was measured: what each has lost, and how long the call took."""
    by_row = {one.row: one for one in series}
    base = by_row[BASE]
    lines: list[Line] = []
    for one in series:
        if one.row.endswith(":blocked"):
            continue
        if not one.samples or not base.samples:
            lines.append(Line(one.row, failure=one.failure or f"there is no row {BASE!r} to hold it against"))
            continue
        lost = [mine - without for mine, without in zip(one.samples, base.samples, strict=True)]
        samples = {"lost": lost, "blocked": by_row[f"{one.row}:blocked"].samples, "segment": one.samples}
        middle, step = statistics.median(lost), statistics.median(base.samples) / StallTraining.STEPS
        cells = [ms(statistics.median(samples["blocked"])), ms(middle), iqr(lost, ms), f"{middle / step:.2f}"]
        lines.append(Line(one.row, cells, samples, {"step": step}))
    return Group(name, title, ["blocked ms", "lost ms", "IQR ms", "lost steps"], lines)
