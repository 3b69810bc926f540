"""How figures are measured: cases take turns, A B C ... A B C, and each row has a median and a spread.

Every round runs every case once, in the same order, so that a busy minute falls on all of them. The first round only
warms up. Figures are compared within one run and never across two. The modules with the rows define what is measured,
and against which ceiling.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar
from unittest import mock

from stagereg.errors import LaunchError, StageregError

__all__ = ["Case", "NotThere", "Series", "Stopwatch", "Timed", "in_own_process", "interleave", "quiet", "spread"]

T = TypeVar("T")

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


class NotThere(StageregError):
    """A row cannot be measured here, through no fault of its own; the message is the reason."""


class Stopwatch:
    """Times a section, and lets the device finish what it was given before it looks at the clock.

    Args:
        settle: returns when the device has nothing left to do.
        clock: seconds, ever growing.
    """

    def __init__(
        self, settle: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._settle = settle
        self._clock = clock
        self._started = 0.0

    def start(self) -> None:
        """Begin a section."""
        self._settle()
        self._started = self._clock()

    def lap(self, settled: bool = True) -> float:
        """Return the seconds since :meth:`start`; with ``settled=False``, without waiting for the device."""
        if settled:
            self._settle()
        return self._clock() - self._started


class Case:
    """Something that is measured once a round, and gives a figure for one row or for several.

    Args:
        rows: the names of its rows.
    """

    def __init__(self, *rows: str) -> None:
        self.rows = rows

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Do it once and return seconds by row. Raises: ``NotThere`` where it cannot be done here."""
        raise NotImplementedError

    def prove(self) -> None:
        """Raise if what was measured does not do what it should. Called once, after the last round."""

    def close(self) -> None:
        """Free everything. Called once, after the last round of all cases."""


class Timed(Case):
    """One row, whose figure is the time of one call.

    Args:
        row: its name.
        make: makes what is called; in the first round, outside of what is timed.
        prepare: returns what it is called with.
        after: is called with that and with what the call returned; raises if it has not done what it should.
    """

    def __init__(
        self,
        row: str,
        make: Callable[[], Callable[[Any], Any]],
        prepare: Callable[[], Any] = lambda: None,
        after: Callable[[Any, Any], object] = lambda given, result: None,
    ) -> None:
        super().__init__(row)
        self._make = make
        self._prepare = prepare
        self._after = after
        self._call: Callable[[Any], Any] | None = None

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Call it once."""
        if self._call is None:
            self._call = self._make()
        given = self._prepare()
        watch.start()
        result = self._call(given)
        seconds = watch.lap()
        self._after(given, result)
        return {self.rows[0]: seconds}

    def close(self) -> None:
        """Let go of what is called, and of the memory that it holds."""
        self._call = None


@dataclass
class Series:
    """What one row has come to.

    Attributes:
        row: its name.
        samples: seconds, one for each round in order; empty if it could not be measured.
        missing: why it is not there.
        failure: what went wrong, where something did.
    """

    row: str
    samples: list[float] = field(default_factory=list)
    missing: str = ""
    failure: str = ""

    @property
    def median(self) -> float:
        """The median of the samples, which must be there."""
        return statistics.median(self.samples)


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile, interpolated within the samples."""
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def interleave(
    cases: Sequence[Case],
    rounds: int,
    watch: Stopwatch,
    before_round: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda round_number: None,
    trim: bool = True,
    shuffle: bool = False,
) -> list[Series]:
    """Measure ``cases`` in turns: one round to warm up, then ``rounds`` that count; then let each prove itself.

    A case that fails is left out from then on, with the reason; its earlier samples do not count.

    Args:
        before_round: called before each round, outside of what is timed.
        progress: called with the number of each round that begins, 0 for the one that warms up.
        trim: give freed memory back to the system before each sample. Otherwise a case that takes fresh memory may find
            pages that it or another has touched, or may not: that depends on what lies above them in the heap.
        shuffle: take another order in each round, the same ones in each run and on each rank.
    """
    series = {case: [Series(row) for row in case.rows] for case in cases}
    alive = list(cases)
    try:
        for number in range(rounds + 1):
            progress(number)
            before_round()
            gc.collect()  # what has grown old; to look at every object of torch takes longer than most samples
            for case in random.Random(number).sample(alive, len(alive)) if shuffle else list(alive):
                gc.collect(1)
                if trim and _malloc_trim is not None:
                    _malloc_trim(0)
                taken = _try(case, case.sample, series, alive, watch)
                if number and taken:
                    for one in series[case]:
                        one.samples.append(taken[one.row])
        before_round()
        for case in list(alive):
            _try(case, case.prove, series, alive)
    finally:
        for case in cases:
            case.close()
    return [one for rows in series.values() for one in rows]


def _try(
    case: Case, action: Callable[..., T], series: Mapping[Case, list[Series]], alive: list[Case], *args: Stopwatch
) -> T | None:
    try:
        return action(*args)
    except NotThere as error:
        missing, failure = str(error), ""
    except Exception as error:
        missing, failure = "", f"{type(error).__name__}: {error}"
    alive.remove(case)
    series[case][:] = [Series(row, missing=missing, failure=failure) for row in case.rows]
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the hints that are for the user of one stager, not for one of all stagers in turn."""
    log = logging.getLogger("stagereg")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def in_own_process(task: Callable[..., T], *args: Any, **environment: str) -> T:
    """Run ``task(*args)`` in a fresh process with these environment variables too, and return what it returns.

    Raises:
        LaunchError: it raised, or its process died.
    """
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(task, *args).result()
        except Exception as error:
            raise LaunchError(f"The process that measures failed: {type(error).__name__}: {error}") from error
