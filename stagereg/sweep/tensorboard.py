"""Runs and sweeps for TensorBoard: scalars per run, and for a sweep its parameters and figures as HParams.

What is written is a copy of what the runs recorded, at any time after them; training knows nothing of it. Written once
more into the same directory, it takes the place of what was there. Needs the package tensorboard.

::

    DIR/            the scalars of a single run, or
    DIR/0, DIR/1    those of the jobs of a sweep, by the names of their directories, with their HParams
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stagereg.errors import ConfigError
from stagereg.sweep.run import Run, Span
from stagereg.sweep.steps import without_stalls

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from stagereg.sweep.comparison import Comparison
    from stagereg.sweep.result import JobResult

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
    with _Writer(directory) as writer:
        writer.run(run)


def write_sweep(comparison: Comparison, directory: Path) -> list[Path]:
    """Write the jobs of a sweep into directories below ``directory`` and return these.

    Each has the scalars of its run, where that left any, its swept parameters and its figures. A job that failed has
    what is known of it.

    Raises:
        ConfigError: the package tensorboard is missing, or the directory cannot be written.
    """
    parameters = _parameters(comparison)
    written = []
    for place, row in enumerate(comparison.rows):
        for job in row.jobs:
            written.append(directory / _name(job, comparison))
            with _Writer(written[-1]) as writer:
                run = _run(job)
                if run is not None:
                    writer.run(run)
                given: dict[str, float | str] = {name: values[place] for name, values in parameters.items()}
                if comparison.repeats > 1:
                    given |= {"repeat": job.repeat, "A/A": "yes" if job.again else "no"}
                writer.hparams(
                    given,
                    {metric.name: job.figures.get(metric.name) for metric in comparison.metrics},
                    completed=job.status == "completed",
                )
    return written


class _Writer:
    """The event file of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> _Writer:
        check()
        from torch.utils.tensorboard import SummaryWriter

        try:
            for old in self._directory.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
            self._writer = SummaryWriter(str(self._directory), filename_suffix=_SUFFIX)
        except OSError as error:
            raise ConfigError(f"--tensorboard: cannot write in {self._directory}: {error.strerror}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        assert self._writer is not None
        self._writer.close()

    def run(self, run: Run) -> None:
        for tag, step, value, at in _scalars(run):
            assert self._writer is not None
            self._writer.add_scalar(tag, value, step, walltime=at)

    def hparams(self, parameters: dict[str, float | str], figures: dict[str, float | None], completed: bool) -> None:
        from torch.utils.tensorboard.summary import hparams

        assert self._writer is not None
        names = {name: f"figures/{name}" for name in figures}
        file = self._writer.file_writer
        assert file is not None
        # TensorBoard takes the columns from the first job it meets, so all jobs name the same ones.
        head, start, end = hparams(parameters, dict.fromkeys(names.values(), 0.0))
        for summary in (head, start, end) if completed else (head, start):
            file.add_summary(summary)
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(names[name], value, 0)


# -- what is written of a run


def _scalars(run: Run) -> Iterator[tuple[str, int, float, float]]:
    """Tag, step, value, seconds since the epoch."""
    for name in ("stall", "stage", "write"):
        yield from _slowest(f"checkpoint/{name}_ms", (getattr(rank, f"{name}s") for rank in run.ranks))
    yield from _slowest("train/step_ms", (without_stalls(rank)[1:] for rank in run.ranks))
    for rank in run.ranks:
        for step, at, values in rank.logs:
            for key, value in values.items():
                number = math.nan if value is None else value
                if rank.rank == 0 and key == "loss":
                    yield "train/loss", step, number, at
                elif rank.rank == 0:
                    yield f"log/{key}", step, number, at
                else:
                    yield f"log/{key}/rank{rank.rank}", step, number, at


def _slowest(tag: str, ranks: Iterable[Iterable[Span]]) -> Iterator[tuple[str, int, float, float]]:
    """For each step the longest span of any rank, in ms."""
    longest: dict[int, Span] = {}
    for span in (span for spans in ranks for span in spans):
        if span.step not in longest or span.seconds > longest[span.step].seconds:
            longest[span.step] = span
    for step in sorted(longest):
        span = longest[step]
        yield tag, step, span.seconds * 1e3, span.start + span.seconds


def _run(job: JobResult) -> Run | None:
    try:
        return Run.read(job.directory)
    except ConfigError:
        return None


# -- what is written of a sweep


def _parameters(comparison: Comparison) -> dict[str, list[float] | list[str]]:
    """The values of each swept parameter, row by row: numbers where all are, else texts."""
    columns = {name: [row.parameters.get(name, "") for row in comparison.rows] for name in comparison.parameters}
    return {name: _numbers(texts) or texts for name, texts in columns.items()}


def _numbers(texts: list[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def _name(job: JobResult, comparison: Comparison) -> Path:
    """Where the job lies in the sweep."""
    try:
        return job.directory.relative_to(comparison.directory)
    except ValueError:
        return Path(job.directory.name)
