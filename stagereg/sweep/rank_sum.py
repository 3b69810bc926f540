"""The Wilcoxon rank-sum test: whether the difference between two sets of values may be due to chance.

Reference: Wilcoxon, "Individual comparisons by ranking methods" (Biometrics Bulletin 1(6), 1945). The test is
two-sided, and equal values get midranks. For up to 100 values in total, the p-value is exact: all assignments of ranks
are counted. For more values, a normal approximation is used, with corrections for ties and for continuity.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

LEVEL = 0.05  # significance level
FEWEST = 4
"""Minimum runs per combination. With 3 and 3 runs, even a complete separation has a p-value of only 0.1."""
_EXACT = 100  # maximum number of values for the exact distribution


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value: the probability that values from one distribution differ at least as much as these."""
    if not one or not other:
        return 1.0
    ordered = sorted([*one, *other])
    # Twice the midrank of each value, so that all ranks are integers.
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in (*one, *other)]
    number, few = len(ranks), len(one)
    off = abs(sum(ranks[:few]) - few * (number + 1))  # deviation of the rank sum from its expected value, doubled
    if number <= _EXACT:
        ways = _ways(tuple(sorted(ranks)), few)
        far = sum(count for total, count in ways.items() if abs(total - few * (number + 1)) >= off)
        return far / math.comb(number, few)
    ties = sum(size**3 - size for size in Counter(ranks).values()) / (number * (number - 1))
    variance = few * (number - few) / 12 * (number + 1 - ties)
    step = math.gcd(*(rank - ranks[0] for rank in ranks))  # smallest possible difference between two rank sums
    return 2 * NormalDist().cdf(-max(0.0, off - step / 2) / 2 / math.sqrt(variance)) if variance > 0 else 1.0


def least_p_value(one: int, other: int) -> float:
    """Return the p-value of completely separated samples, the lowest possible, for samples of these two sizes."""
    return min(1.0, 2 / math.comb(one + other, one))


@lru_cache(maxsize=64)
def _ways(ranks: tuple[int, ...], few: int) -> dict[int, int]:
    """Return how many subsets of ``few`` ranks have each sum: a dict from the sum to the number of subsets."""
    width = len(ranks)  # bits per count, because each count is below 2 ** len(ranks)
    # chosen[n] is a large integer that packs the counts of n chosen ranks for all sums, `width` bits per sum.
    chosen = [1] + [0] * few
    for rank in ranks:
        for at in range(few, 0, -1):
            chosen[at] += chosen[at - 1] << width * rank
    packed, mask = chosen[few], (1 << width) - 1
    counts = (packed >> width * total & mask for total in range(packed.bit_length() // width + 1))
    return {total: count for total, count in enumerate(counts) if count}
