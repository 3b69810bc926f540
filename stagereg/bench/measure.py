"""How figures are measured: cases take turns, A B C ... A B C, and each row has a median and a spread.

Every round runs every case once, in the same order, so that a busy minute falls on all of them. The first round only
warms up. Figures are compared within one run and never across two. The modules with the rows define what is measured,
and against which ceiling.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stagereg.errors import StageregError

__all__ = ["Case", "NotThere", "Series", "Stopwatch", "interleave", "spread"]


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

    def ratio(self, ceiling: Series) -> float:
        """How many times the time of ``ceiling`` this took: median by median, 1.0 is as fast."""
        return self.median / ceiling.median


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
) -> list[Series]:
    """Measure ``cases`` in turns: one round to warm up, then ``rounds`` that count; then let each prove itself.

    A case that fails is left out from then on, with the reason; its earlier samples do not count.

    Args:
        before_round: called before each round, outside of what is timed.
        progress: called with the number of each round that begins, 0 for the one that warms up.
        trim: give freed memory back to the system before each sample. Otherwise a case that takes fresh memory may find
            pages that it or another has touched, or may not: that depends on what lies above them in the heap.
    """
    series = {case: [Series(row) for row in case.rows] for case in cases}
    try:
        for number in range(rounds + 1):
            progress(number)
            before_round()
            gc.collect()
            for case in _alive(series):
                _clear_away(trim)
                taken = _try(case.sample, series[case], watch)
                if number and taken:
                    for one in series[case]:
                        one.samples.append(taken[one.row])
        before_round()
        for case in _alive(series):
            _try(case.prove, series[case])
    finally:
        for case in cases:
            case.close()
    return [one for rows in series.values() for one in rows]


def _clear_away(trim: bool) -> None:
    """Leave nothing of one case to the next: neither garbage to collect, nor memory that is free but mapped.

    What has grown old is collected once a round: looking at every object of torch takes longer than most samples.
    """
    gc.collect(1)
    if trim and _malloc_trim is not None:
        _malloc_trim(0)


def _alive(series: Mapping[Case, list[Series]]) -> list[Case]:
    return [case for case, rows in series.items() if not any(one.missing or one.failure for one in rows)]


def _try(
    action: Callable[..., Mapping[str, float] | None], rows: Sequence[Series], *args: Stopwatch
) -> Mapping[str, float] | None:
    try:
        return action(*args)
    except NotThere as error:
        missing, failure = str(error), ""
    except Exception as error:
        missing, failure = "", f"{type(error).__name__}: {error}"
    for one in rows:
        one.samples.clear()
        one.missing, one.failure = missing, failure
    return None
