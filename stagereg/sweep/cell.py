"""One figure of one combination, and whether the runs of two combinations tell them apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stagereg.sweep.number_text import percent
from stagereg.sweep.rank_sum import FEWEST, LEVEL, least_p_value, p_value

EQUAL, FEW = "the figures are equal", "there are fewer than 4 runs"  # reasons why rows tie without a test
_RANGE = 5  # values up to which a range holds them all; of more it is the range between the quartiles
_FAR_OFF = 14.826  # median absolute deviations beyond which a run is far off, as hyperfine has it
_ROUNDING = 1e-6  # relative difference of figures that may come from the order in which numbers were added


@dataclass(frozen=True)
class Cell:
    """One figure of one combination."""

    median: float  # of the values; NaN if one of them is
    values: tuple[float, ...]  # of the completed jobs, in their order; may hold NaN and infinity
    low: float  # the least value, or the first quartile of more than five
    high: float  # the greatest value, or the third quartile of more than five
    outliers: tuple[str, ...] = ()  # names of jobs whose value is far off
    verdict: str = ""  # `"best"` of its column, `"tie"` with the best, or empty
    reason: str = ""  # why it ties
    chance: float = 1.0  # how often chance alone makes it and the best differ by as much

    @classmethod
    def of(cls, values: Sequence[float], jobs: Sequence[str] = ()) -> Cell:
        """Sum up ``values``, in the order of ``jobs``, the names of what they are of."""
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
        """By what part of the larger one the medians differ, from 0 to 2."""
        if math.isclose(self.median, other.median, rel_tol=_ROUNDING):
            return 0.0
        return abs(self.median - other.median) / max(abs(self.median), abs(other.median))


def ties(best: Cell, rivals: Sequence[Cell], matters: float = 0.0, unsteady: float = 0.0) -> list[str]:
    """Return for each rival why it ties with the best; an empty text for one that the runs tell apart.

    All rivals are told apart if each is by its own test: chance does that to equal rows in at most 5 % of sweeps.
    Otherwise Holm's correction (Scandinavian Journal of Statistics 6(2), 1979) makes the tests of several rivals
    stricter, so that of many equal rows few lose their tie; but complete separation is always enough. ``unsteady`` is
    the relative difference by which a combination has been told apart from itself; 0 if it has not.
    """
    reasons = [_no_test(best, rival, matters, unsteady) for rival in rivals]
    chances = {at: p_value(best.values, rivals[at].values) for at, why in enumerate(reasons) if not why}
    strict = len(chances) < len(rivals) or any(chance > LEVEL for chance in chances.values())
    left, open_ = len(chances), True
    for at, chance in sorted(chances.items(), key=lambda each: each[1]):
        complete = least_p_value(len(best.values), len(rivals[at].values)) * (1 + _ROUNDING)
        level = max(LEVEL / left, complete) if strict else LEVEL
        if not (open_ := open_ and chance <= level):
            reasons[at] = "chance may make such a difference"
        left -= 1
    return reasons


def _no_test(best: Cell, rival: Cell, matters: float, unsteady: float) -> str:
    """Why two cells tie whatever a test finds; empty if the test decides."""
    difference = best.differs_by(rival)
    if difference == 0:
        return EQUAL
    if difference <= matters:
        return f"the difference is less than {percent(matters)}"
    if min(len(best.values), len(rival.values)) < FEWEST:
        return FEW
    if difference <= unsteady:
        return "one combination differs from itself by as much"
    return ""


def _far_off(values: Sequence[float]) -> list[bool]:
    if len(values) < FEWEST or not all(map(math.isfinite, values)):
        return [False] * len(values)
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return [abs(value - middle) > max(_FAR_OFF * deviation, LEVEL * abs(middle)) for value in values]
