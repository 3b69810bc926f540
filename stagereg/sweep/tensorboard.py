"""Runs and sweeps for TensorBoard: scalars per run, and for a sweep its parameters and figures as HParams.

What is written is a copy of what the runs recorded, at any time after them; training knows nothing of it. Written once
more into the same directory, it takes the place of what was there. Needs the package tensorboard.

::

    DIR/            the scalars of a single run, or
    DIR/0, DIR/1    those of the jobs of a sweep, by the names of their directories, with their HParams
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.errors import ConfigError
from stagereg.sweep.run import Run, Span

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from stagereg.sweep.comparison import Comparison

__all__ = ["check", "write_run", "write_sweep"]

_SUFFIX = ".stagereg"
"""The end of the names of the files written here, which distinguishes them from others in the same directory."""


def check() -> None:
    """Raise ``ConfigError`` if the package tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install 'hydra-stagereg[tensorboard]'")


def write_run(run: Run, directory: Path) -> None:
    """Write the scalars of a run into ``directory``: steps, checkpoints and what it logged.

    ``train/step_ms`` (without stalls; the first step is left out, since it is unknown when it began),
    ``checkpoint/stall_ms``, ``checkpoint/stage_ms`` and ``checkpoint/write_ms`` are those of the slowest rank.
    ``train/loss`` and ``log/KEY`` are what rank 0 logged, ``log/KEY/rank3`` what rank 3 did; NaN stays NaN.

    Raises:
        ConfigError: the package tensorboard is missing, or the directory cannot be written.
    """
    with _opened(directory) as writer:
        _write_scalars(run, writer)


def write_sweep(comparison: Comparison, directory: Path) -> list[Path]:
    """Write the jobs of a sweep into directories below ``directory`` and return these.

    Each has the scalars of its run, where that left any, its swept parameters and its figures. A job that failed has
    what is known of it.

    Raises:
        ConfigError: the package tensorboard is missing, or the directory cannot be written.
    """
    written = []
    for row in comparison.rows:
        given: dict[str, float | str] = {}
        for name in comparison.parameters:
            texts = [each.parameters.get(name, "") for each in comparison.rows]
            value = row.parameters.get(name, "")
            given[name] = float(value) if all(map(_is_number, texts)) else value
        for job in row.jobs:
            repeat: dict[str, float | str] = {"repeat": job.repeat, "A/A": "yes" if job.again else "no"}
            written.append(directory / job.directory.relative_to(comparison.directory))
            with _opened(written[-1]) as writer:
                with contextlib.suppress(ConfigError):  # a job that recorded nothing has its figures
                    _write_scalars(Run.read(job.directory), writer)
                known = {metric.name: job.figures.get(metric.name) for metric in comparison.metrics}
                _write_hparams(given | repeat, known, job.status == "completed", writer)
    return written


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[SummaryWriter]:
    """The event file of one directory, in the place of an older one."""
    check()
    from torch.utils.tensorboard import SummaryWriter

    try:
        for old in directory.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        writer = SummaryWriter(str(directory), filename_suffix=_SUFFIX)
    except OSError as error:
        raise ConfigError(f"--tensorboard: cannot write in {directory}: {error.strerror}.") from error
    with contextlib.closing(writer):
        yield writer


def _write_scalars(run: Run, writer: SummaryWriter) -> None:
    spans: dict[str, list[Sequence[Span]]] = {
        "checkpoint/stall_ms": [rank.stalls for rank in run.ranks],
        "checkpoint/stage_ms": [rank.stages for rank in run.ranks],
        "checkpoint/write_ms": [rank.writes for rank in run.ranks],
        "train/step_ms": [rank.step_spans()[1:] for rank in run.ranks],
    }
    for tag, of_ranks in spans.items():
        every = sorted((span for spans in of_ranks for span in spans), key=lambda span: span.seconds)
        for step, span in sorted({span.step: span for span in every}.items()):
            writer.add_scalar(tag, span.seconds * 1e3, step, walltime=span.end)
    for rank in run.ranks:
        for step, at, values in rank.logs:
            for key, value in values.items():
                of_rank = f"log/{key}/rank{rank.rank}" if rank.rank else f"log/{key}"
                tag = "train/loss" if of_rank == "log/loss" else of_rank
                writer.add_scalar(tag, math.nan if value is None else value, step, walltime=at)


def _write_hparams(
    parameters: dict[str, float | str], figures: dict[str, float | None], completed: bool, writer: SummaryWriter
) -> None:
    from torch.utils.tensorboard.summary import hparams

    names = {name: f"figures/{name}" for name in figures}
    # TensorBoard takes the columns from the first job it meets, so all jobs name the same ones.
    head, start, end = hparams(parameters, dict.fromkeys(names.values(), 0.0))
    file = writer.file_writer
    assert file is not None
    for summary in (head, start, end) if completed else (head, start):
        file.add_summary(summary)
    for name, value in figures.items():
        if value is not None:
            writer.add_scalar(names[name], value, 0)
