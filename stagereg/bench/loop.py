"""The training loop that ``stall`` disturbs with checkpoints; ``python -m stagereg.bench.loop`` is its own process.

A transformer whose weights and Adam state are 168 MiB at full scale is trained on made-up tokens. A segment is one
checkpoint, four steps, and waiting until the checkpoint is durable; each round has one segment for every way of saving,
and one without a checkpoint. The number of torch's threads is fixed when a process starts, so each has its own.

The settings come as JSON in the one argument, see :class:`StallSettings`; the series go as JSON into the file it names.
Standard error has what went wrong, and the output of torch's save process; progress goes to standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from stagereg.bench.ceiling import flush
from stagereg.bench.measure import Case, NotThere, Series, Stopwatch, interleave
from stagereg.bench.report import progress
from stagereg.errors import UnknownNameError
from stagereg.registry import build

__all__ = ["StallSettings", "StallTraining", "main", "measure"]


@dataclasses.dataclass(frozen=True)
class StallSettings:
    """What to measure.

    Attributes:
        rows: the ways of saving, by the names of their rows.
        rounds: rounds that count.
        threads: torch's threads.
        scale: of the bytes.
        device: where the model is.
        folder: an empty directory for the checkpoints.
        result: the file for what was measured.
    """

    rows: tuple[str, ...]
    rounds: int
    threads: int
    scale: float
    device: str
    folder: str
    result: str


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
    """torch's ``async_save``, as it is or with a process that writes and a kept stager in shared memory."""

    def __init__(self, row: str, training: StallTraining, folder: Path, process: bool) -> None:
        super().__init__(row, training, folder)
        self._process = process
        self._options: dict[str, Any] = {}
        self._future: Any = None

    def begin(self) -> None:
        """Make an empty directory; the first time, the stager."""
        if self._process and not self._options:
            stager = DefaultStager(StagingOptions(False, True, False, False))
            self._options = {"async_stager": stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        for old in self.folder.iterdir():
            shutil.rmtree(old)
        self._target = Path(tempfile.mkdtemp(dir=self.folder))

    def save(self) -> None:
        """Stage, and let it be written."""
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        with self._excused():
            self._future = async_save(state, checkpoint_id=self._target, **self._options)

    def wait(self) -> None:
        """Wait for the writer, then flush what it has not."""
        with self._excused():
            self._future.result()
        flush(self._target)

    def close(self) -> None:
        """Close the kept stager."""
        if self._options:
            self._options["async_stager"].close()

    @contextlib.contextmanager
    def _excused(self) -> Any:
        """A process that cannot be started here is no failure of the benchmark."""
        try:
            yield
        except Exception as error:
            if not self._process:
                raise
            raise NotThere(f"torch: {type(error).__name__}: {error}") from error


class Checkpoints(Segment):
    """The project's checkpointer with one stager and one storage."""

    def __init__(self, row: str, training: StallTraining, folder: Path) -> None:
        super().__init__(row, training, folder)
        self._checkpointer: Any = None
        self._step = 0

    def begin(self) -> None:
        """Build the checkpointer the first time."""
        if self._checkpointer is None:
            stager, storage = self.rows[0].split("+")
            try:
                parts = {"stager": build("stager", stager), "storage": build("storage", storage)}
            except UnknownNameError as error:
                raise NotThere(str(error).partition("\n")[0]) from error
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


def measure(settings: StallSettings, progress: Callable[[int], None]) -> list[Series]:
    """Train, save and take the times; for a process of its own."""
    torch.set_num_threads(settings.threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = StallTraining(settings.scale, settings.device)
    cases = [_case(row, training, Path(tempfile.mkdtemp(dir=settings.folder))) for row in settings.rows]
    settle = torch.cuda.synchronize if settings.device != "cpu" else lambda: None
    try:
        return interleave(cases, settings.rounds, Stopwatch(settle), progress=progress)
    finally:
        dist.destroy_process_group()


def main(argument: str) -> None:
    """Measure what the settings ask for and write down what came of it."""
    given = json.loads(argument)
    settings = StallSettings(**{**given, "rows": tuple(given["rows"])})
    logging.getLogger("stagereg").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    series = measure(settings, progress(f"stall, {settings.threads} torch threads", settings.rounds, sys.stdout))
    Path(settings.result).write_text(json.dumps([dataclasses.asdict(one) for one in series]))


def _case(row: str, training: StallTraining, folder: Path) -> Segment:
    if row.endswith("none"):
        return Segment(row, training, folder)
    if row.startswith("torch:"):
        return TorchAsyncSave(row, training, folder, process=row == "torch:process")
    return Checkpoints(row, training, folder)


if __name__ == "__main__":
    main(sys.argv[1])
