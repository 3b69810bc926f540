"""The values of one metric for one combination, and the test whether two combinations differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stagereg.sweep.number_text import percent
from stagereg.sweep.rank_sum import FEWEST, LEVEL, least_p_value, p_value

EQUAL, FEW = "the values are equal", "there are fewer than 4 runs"  # reasons why two cells tie without a test
_RANGE = 5  # The range is minimum to maximum for up to 5 values, and the interquartile range for more values.
_FAR_OFF = 14.826  # A run is an outlier beyond this number of median absolute deviations, as in hyperfine.
_ROUNDING = 1e-6  # maximum relative difference that counts as a rounding error


@dataclass(frozen=True)
class Cell:
    """The values of one metric for one combination: a cell of the comparison table."""

    median: float  # NaN if any value is NaN
    values: tuple[float, ...]  # one value for each completed job, in job order; may include NaN and infinity
    low: float  # minimum, or first quartile if there are more than five values
    high: float  # maximum, or third quartile if there are more than five values
    outliers: tuple[str, ...] = ()  # names of the jobs whose value is an outlier
    verdict: str = ""  # `"best"` of the column, `"tie"` with the best, or empty
    reason: str = ""  # why the cell ties with the best
    chance: float = 1.0  # p-value of the difference from the best cell

    @classmethod
    def of(cls, values: Sequence[float], jobs: Sequence[str] = ()) -> Cell:
        """Build a cell from the values of a metric and the names of their jobs."""
        if any(map(math.isnan, values)):
            return cls(math.nan, tuple(values), math.nan, math.nan)
        low, high = min(values), max(values)
        if len(values) > _RANGE and all(map(math.isfinite, values)):
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        far = tuple(job for job, is_far in zip(jobs, _far_off(values), strict=False) if is_far)
        return cls(statistics.median(values), tuple(values), low, high, far)

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    def differs_by(self, other: Cell) -> float:
        """Return the difference of the medians, divided by the larger absolute median: from 0 to 2."""
        if math.isclose(self.median, other.median, rel_tol=_ROUNDING):
            return 0.0
        return abs(self.median - other.median) / max(abs(self.median), abs(other.median))


def ties(best: Cell, rivals: Sequence[Cell], matters: float = 0.0, unsteady: float = 0.0) -> list[str]:
    """Return for each rival why it ties with the best cell, or an empty string if the difference is significant.

    If the test of every rival is significant at 5 %, no rival ties; this has a probability of at most 5 % if all rows
    are equal. Otherwise, Holm's correction for multiple tests applies (Scandinavian Journal of Statistics 6(2), 1979),
    but a complete separation of the values always counts as significant. ``matters``: relative difference up to which
    cells tie. ``unsteady``: relative difference of an A/A pair if it is significant, otherwise 0.
    """
    reasons = [_no_test(best, rival, matters, unsteady) for rival in rivals]
    chances = {at: p_value(best.values, rivals[at].values) for at, why in enumerate(reasons) if not why}
    strict = len(chances) < len(rivals) or any(chance > LEVEL for chance in chances.values())
    left, open_ = len(chances), True
    for at, chance in sorted(chances.items(), key=lambda each: each[1]):
        complete = least_p_value(len(best.values), len(rivals[at].values)) * (1 + _ROUNDING)
        level = max(LEVEL / left, complete) if strict else LEVEL
        if not (open_ := open_ and chance <= level):
            reasons[at] = "the difference may be due to chance"
        left -= 1
    return reasons


def _no_test(best: Cell, rival: Cell, matters: float, unsteady: float) -> str:
    """Return why two cells tie without a significance test, or an empty string if the test must decide."""
    difference = best.differs_by(rival)
    if difference == 0:
        return EQUAL
    if difference <= matters:
        return f"the difference is less than {percent(matters)}"
    if min(len(best.values), len(rival.values)) < FEWEST:
        return FEW
    if difference <= unsteady:
        return "the A/A pair differs at least as much"
    return ""


def _far_off(values: Sequence[float]) -> list[bool]:
    if len(values) < FEWEST or not all(map(math.isfinite, values)):
        return [False] * len(values)
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return [abs(value - middle) > max(_FAR_OFF * deviation, LEVEL * abs(middle)) for value in values]
