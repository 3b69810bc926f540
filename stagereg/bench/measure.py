"""How figures are measured: cases take turns, in another order each round, and each row has a median and a spread.

So a busy minute falls on all of them. The first round only warms up. Figures are compared within one run and never
across two. The modules with the rows define what is measured, and against which ceiling.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import random
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import stagereg.base.output as output
from stagereg.base.machine import memory
from stagereg.errors import LaunchError

T = TypeVar("T")

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class Case:
    """Something that is measured once a round, and gives a figure for each of ``rows``; see :meth:`turn`."""

    def __init__(self, *rows: str, turn: Callable[[], Iterator[float | None]] | None = None) -> None:
        self.rows = rows
        self._turn = turn

    def turn(self) -> Iterator[float | None]:
        """Do it once: yields when it is ready, and then when the time of each row is over, the last one's last.

        What comes before the first ``yield`` and after the last one is not timed. A row that is no time, or has been
        timed already, has its figure yielded.
        """
        if self._turn is None:
            raise NotImplementedError
        return self._turn()

    def sample(self, settle: Callable[[], None], clock: Callable[[], float]) -> Mapping[str, float]:
        """Do it once and return seconds by row; for the last row the device has to be done (``settle``)."""
        turn = self.turn()
        next(turn)
        settle()
        began = clock()
        seconds: list[float] = []
        for figure in turn:
            if len(seconds) + 1 == len(self.rows):
                settle()
            seconds.append(clock() - began if figure is None else figure)
        return dict(zip(self.rows, seconds, strict=True))

    def prove(self) -> None:
        """Raise if what was measured does not do what it should. Called once, after the last round."""

    def close(self) -> None:
        """Free everything. Called once, after the last round of all cases."""


@dataclass
class Series:
    """What one row has come to: seconds of each round in order, or what went wrong."""

    row: str
    samples: list[float] = field(default_factory=list)
    failure: str = ""


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile, interpolated within the samples."""
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def standard_error(samples: Sequence[float]) -> float:
    """Return that of the median, from the quartiles, as of samples that are distributed normally."""
    first, third = spread(samples)
    return 0.93 * (third - first) / math.sqrt(len(samples))


def interleave(
    cases: Sequence[Case],
    rounds: int,
    settle: Callable[[], None] = lambda: None,
    before_round: Callable[[], None] = lambda: None,
    what: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Series]:
    """Measure ``cases`` in turns: one round to warm up, then ``rounds`` that count; then let each prove itself.

    Each round has another order, the same ones in each run and on each rank. Before each sample freed memory goes back
    to the system: otherwise a case that takes fresh memory now and then finds pages that were touched before. A case
    that fails is left out from then on, with the reason; its earlier samples do not count.

    ``settle`` returns when the device is idle; ``before_round`` is not timed; ``what`` is for the progress line.
    """
    series = {case: [Series(row) for row in case.rows] for case in cases}
    alive = list(cases)

    def attempt(case: Case, action: Callable[..., T], *args: Callable[[], Any]) -> T | None:
        try:
            return action(*args)
        except Exception as error:
            alive.remove(case)
            series[case] = [Series(row, failure=f"{type(error).__name__}: {error}") for row in case.rows]
            return None

    try:
        for number in range(rounds + 1):
            output.progress(f"{what}: round {number} of {rounds}")
            before_round()
            gc.collect()  # what has grown old; to look at every object of torch takes longer than most samples
            for case in random.Random(number).sample(alive, len(alive)):
                gc.collect(1)
                if _malloc_trim is not None:
                    _malloc_trim(0)
                taken = attempt(case, case.sample, settle, clock)
                if number and taken:
                    for one in series[case]:
                        one.samples.append(taken[one.row])
        before_round()
        for case in list(alive):
            attempt(case, case.prove)
    finally:
        output.progress()
        for case in cases:
            case.close()
    return [one for rows in series.values() for one in rows]


def peaks(cases: Sequence[Case]) -> dict[str, int]:
    """Return the most bytes of host memory that each row's case takes, above what the process had before.

    Call it when all of them are closed: each starts afresh, is done twice, of which the second time finds what was
    kept, and is closed again. Counted is what is resident in this process (``VmHWM``), which on Linux is all but what a
    driver has handed out. A case that fails, and all of them where the system does not count, have no entry.
    """
    found: dict[str, int] = {}
    for case in cases:
        gc.collect()
        if _malloc_trim is not None:
            _malloc_trim(0)
        with suppress(Exception):
            Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is resident now
            before = memory("VmRSS")
            for _ in range(2):
                deque(case.turn(), maxlen=0)
            found |= dict.fromkeys(case.rows, max(0, memory("VmHWM") - before))
        case.close()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the hints that are for the user of one stager, not for one of all stagers in turn, and torch's log."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    log = logging.getLogger("stagereg")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            mock.patch.object(_AsyncCheckpointProcess, "_checkpointing_subprocess", staticmethod(_save_quietly)),
        ):
            yield
    finally:
        log.setLevel(level)


def _save_quietly(*args: Any) -> None:
    """What torch runs in its process that saves, but for its log, which would print several lines a checkpoint."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    logging.disable(logging.INFO)
    _AsyncCheckpointProcess._checkpointing_subprocess(*args)


def in_own_process(task: Callable[..., T], *args: Any, **environment: str) -> T:
    """Run ``task(*args)`` in a fresh process with these environment variables too, and return what it returns.

    Unlike a rank of ``run_ranks``, torch starts with these variables, there is no process group, and progress is shown.

    Raises:
        LaunchError: it raised, or its process died.
    """
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(task, *args).result()
        except Exception as error:
            raise LaunchError(f"The process that measures failed: {type(error).__name__}: {error}") from error
