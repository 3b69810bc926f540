"""The rank-sum test: the probability that two sets of equal runs differ as much as observed.

Wilcoxon, "Individual comparisons by ranking methods" (Biometrics Bulletin 1(6), 1945), two-sided, with midranks for
equal values. The distribution is exact for up to 100 values in total: all assignments of ranks are counted. For more
values the normal approximation is used, with corrections for ties and for continuity.
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
"""Minimum runs per combination for a test: with 3 and 3 runs, chance separates them completely 1 time in 10."""
_EXACT = 100  # maximum number of values for the exact distribution


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the probability that equal combinations differ at least as much as ``one`` and ``other``."""
    if not one or not other:
        return 1.0
    ranks = _doubled_ranks([*one, *other])
    number, few = len(ranks), len(one)
    off = abs(sum(ranks[:few]) - few * (number + 1))  # deviation from the expected sum, in halves of a rank
    if number <= _EXACT:
        ways = _ways(tuple(sorted(ranks)), few)
        far = sum(count for total, count in ways.items() if abs(total - few * (number + 1)) >= off)
        return far / math.comb(number, few)
    ties = sum(size**3 - size for size in Counter(ranks).values()) / (number * (number - 1))
    variance = few * (number - few) / 12 * (number + 1 - ties)
    step = math.gcd(*(rank - ranks[0] for rank in ranks))  # smallest difference between two sums
    return 2 * NormalDist().cdf(-max(0.0, off - step / 2) / 2 / math.sqrt(variance)) if variance > 0 else 1.0


def least_p_value(one: int, other: int) -> float:
    """Return the p-value if all of ``one`` runs are better than all of ``other`` runs, or all worse."""
    return min(1.0, 2 / math.comb(one + other, one))


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the midrank of each value."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in values]


@lru_cache(maxsize=64)
def _ways(ranks: tuple[int, ...], few: int) -> dict[int, int]:
    """Return, for each sum of doubled ranks, the number of subsets of ``few`` values with that sum."""
    width = len(ranks)  # bits per count, which is below 2 ** len(ranks)
    # One large integer per number of chosen values holds the counts for all sums, `width` bits each.
    chosen = [1] + [0] * few
    for rank in ranks:
        for at in range(few, 0, -1):
            chosen[at] += chosen[at - 1] << width * rank
    packed, mask = chosen[few], (1 << width) - 1
    counts = (packed >> width * total & mask for total in range(packed.bit_length() // width + 1))
    return {total: count for total, count in enumerate(counts) if count}
