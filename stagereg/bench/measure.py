"""Measures several cases in rounds, and computes a median and quartiles for each row of the result.

Each round measures every case once, in a different order, so that a busy period of the machine affects all cases. The
first round is a warm-up. Compare only results of one run. The modules ``staging`` and ``stall`` define the cases.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import stagereg.base.output as output
from stagereg.base.machine import memory
from stagereg.errors import LaunchError

T = TypeVar("T")

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has this function


class Case:
    """An operation that is measured once per round. It yields one sample for each of ``rows``; see :meth:`turn`."""

    def __init__(self, *rows: str, turn: Callable[[], Iterator[float | None]] | None = None) -> None:
        self.rows = rows
        self._turn = turn

    def turn(self) -> Iterator[float | None]:
        """Run the operation once, as a generator: ``yield`` at the start, and then at the end of each row's time.

        Code before the first ``yield`` and after the last one is not timed. To record a number instead of the elapsed
        time as the sample of a row, yield this number.
        """
        if self._turn is None:
            raise NotImplementedError
        return self._turn()

    def sample(self, settle: Callable[[], None], clock: Callable[[], float]) -> Mapping[str, float]:
        """Run the operation once, and return the seconds by row. ``settle``: waits until the device is idle."""
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
        """Raise an error if the measured operation gives wrong results. Called once, after the last round."""

    def close(self) -> None:
        """Release all resources. Called once, after the last round of all cases."""


@dataclass
class Series:
    """The result of a row: the seconds in each round, or the error if the case failed."""

    row: str
    samples: list[float] = field(default_factory=list)
    failure: str = ""


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile, interpolated between samples."""
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def standard_error(samples: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the quartiles for normally distributed samples."""
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
    """Measure ``cases`` in one warm-up round and ``rounds`` further rounds. Then call ``prove`` of each case.

    Each round has a different order, which is the same in all runs and on all ranks. Before each sample, freed memory
    is returned to the system; otherwise a case that allocates memory would sometimes get pages that are already mapped.
    If a case fails, it does not run again, and its result is the error instead of samples.

    ``settle``: waits until the device is idle. ``before_round``: called before each round, not timed. ``what``: text
    for the progress line.
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
            gc.collect()  # A full collection takes longer than most samples, so run it only once per round.
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
    """Map each row to the peak of host memory in bytes, less the memory that the process had before the case.

    Call this function after all cases are closed. Each case runs twice, so that the second run uses cached memory, and
    is closed again. The peak is ``VmHWM``, the resident memory of this process, without memory that a driver allocated.
    A case that fails has no entry. On a system without ``VmHWM``, the result is empty.
    """
    found: dict[str, int] = {}
    for case in cases:
        gc.collect()
        if _malloc_trim is not None:
            _malloc_trim(0)
        with suppress(Exception):
            Path("/proc/self/clear_refs").write_text("5")  # This resets VmHWM to the current resident memory.
            before = memory("VmRSS")
            for _ in range(2):
                deque(case.turn(), maxlen=0)
            found |= dict.fromkeys(case.rows, max(0, memory("VmHWM") - before))
        case.close()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, log messages of stagereg below ERROR, and the log of torch's checkpoint process."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    log = logging.getLogger("stagereg")
    with ExitStack() as after:
        after.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        after.enter_context(warnings.catch_warnings(action="ignore"))
        quietly = staticmethod(_save_quietly)
        after.enter_context(mock.patch.object(_AsyncCheckpointProcess, "_checkpointing_subprocess", quietly))
        yield


def _save_quietly(*args: Any) -> None:
    """Run torch's checkpoint process without its log, which prints several lines per checkpoint."""
    from torch.distributed.checkpoint._async_process_executor import _AsyncCheckpointProcess

    logging.disable(logging.INFO)
    _AsyncCheckpointProcess._checkpointing_subprocess(*args)


def in_own_process(task: Callable[..., T], *args: Any, **environment: str) -> T:
    """Run ``task(*args)`` in a new process with additional environment variables, and return its result.

    Unlike a rank of ``run_ranks``, the process imports torch after these variables are set, and has no process group.

    Raises:
        LaunchError: the task raised an error, or its process died.
    """
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(task, *args).result()
        except Exception as error:
            raise LaunchError(f"The benchmark process failed: {type(error).__name__}: {error}") from error
