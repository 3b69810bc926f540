"""``stagereg bench stall``: what a checkpoint costs the training it interrupts.

A transformer whose weights and Adam state are 168 MiB at full scale is trained on made-up tokens. A segment is one
checkpoint, four steps, and waiting until the checkpoint is durable; each round has one segment for every way of saving,
and one without a checkpoint. *Lost* is a segment less the segment without a checkpoint of the same round. One group a
number of torch threads, each measured in a process of its own, since that number is best set when a process starts.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from stagereg.bench.ceiling import flush
from stagereg.bench.measure import Case, NotThere, Series, Stopwatch, in_own_process, interleave, quiet
from stagereg.bench.report import Group, Line, progress
from stagereg.registry import build

__all__ = ["BASE", "StallTraining", "group", "measured", "row_names"]

BASE = "none"
"""The row without a checkpoint, which all others are held against."""

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


class Segment(Case):
    """One checkpoint and the steps that it may disturb. Rows: the segment, and of it the time in the call."""

    def __init__(self, row: str, training: StallTraining, folder: Path) -> None:
        super().__init__(row, f"{row}:blocked")
        self.training = training
        self.folder = folder

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Run one segment."""
        self.begin()
        self.training.step()  # whatever the last segment left behind is not for this one
        watch.start()
        self.save()
        blocked = watch.lap(settled=False)
        for _ in range(self.training.STEPS):
            self.training.step()
        self.wait()
        return dict(zip(self.rows, (watch.lap(), blocked), strict=True))

    def begin(self) -> None:
        """Get ready, outside of what is timed."""

    def save(self) -> None:
        """Begin a checkpoint."""

    def wait(self) -> None:
        """Return when it is durable."""


class TorchAsyncSave(Segment):
    """torch's ``async_save`` as it is."""

    options: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Make an empty directory."""
        for old in self.folder.iterdir():
            shutil.rmtree(old)
        self.target = Path(tempfile.mkdtemp(dir=self.folder))

    def save(self) -> None:
        """Stage, and let it be written."""
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        self.future: Any = async_save(state, checkpoint_id=self.target, **self.options)

    def wait(self) -> None:
        """Wait for the writer, then flush what it has not."""
        self.future.result()
        flush(self.target)


class TorchProcess(TorchAsyncSave):
    """torch's ``async_save`` with a process that writes and a kept stager in shared memory."""

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Run one segment; that a process cannot be started here is no failure of the benchmark."""
        if not self.options:
            stager = DefaultStager(StagingOptions(False, True, False, False))
            self.options = {"async_stager": stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        try:
            return super().sample(watch)
        except Exception as error:
            raise NotThere(f"torch: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the kept stager."""
        if self.options:
            self.options["async_stager"].close()


class Checkpoints(Segment):
    """The project's checkpointer with one stager and one storage."""

    _checkpointer: Any = None
    _step = 0

    def begin(self) -> None:
        """Build the checkpointer the first time."""
        if self._checkpointer is None:
            stager, storage = self.rows[0].split("+")
            parts = {"stager": build("stager", stager), "storage": build("storage", storage)}
            self._checkpointer = build("checkpoint", "default", dir=str(self.folder), every=1, keep=1, **parts)

    def save(self) -> None:
        """Save the next step."""
        self._step += 1
        state = {"model": self.training.model, "optimizer": self.training.optimizer}
        self._checkpointer.save(self._step, state)

    def wait(self) -> None:
        """Wait until it is committed."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Close it, and the stager with it."""
        if self._checkpointer is not None:
            self._checkpointer.close()


_TORCHS = {"torch:async_save": TorchAsyncSave, "torch:process": TorchProcess}


def row_names() -> list[str]:
    """The names of all rows there are."""
    ours = [f"{stager}+{storage}" for stager in _STAGERS for storage in _STORAGES]
    return [BASE, *_TORCHS, *ours, f"again:{BASE}"]


def measured(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    """Measure the loop in a process of its own with so many torch threads.

    Args:
        rows: names of :func:`row_names`.
        rounds: that count.
        threads: torch's threads.
        scale: of the bytes.
        device: where the model is.
        folder: an empty directory for the checkpoints.

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
    ours = {BASE: Segment, f"again:{BASE}": Segment, **_TORCHS}
    cases = [ours.get(row, Checkpoints)(row, training, Path(tempfile.mkdtemp(dir=folder))) for row in rows]
    settle = torch.cuda.synchronize if device != "cpu" else lambda: None
    show = progress(f"stall, {threads} torch threads", rounds, sys.stderr)
    try:
        with quiet():
            return interleave(cases, rounds, Stopwatch(settle), progress=show)
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
        line = Line(one.row, missing=one.missing, failure=one.failure)
        if one.samples and base.samples:
            lost = [mine - without for mine, without in zip(one.samples, base.samples, strict=True)]
            figures = {"lost": lost, "blocked": by_row[f"{one.row}:blocked"].samples, "segment": one.samples}
            line = Line(one.row, figures, step_seconds=base.median / StallTraining.STEPS)
        lines.append(line)
    return Group(name, title, lines)
