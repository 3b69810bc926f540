"""The rank-sum test: how often chance alone makes two sets of runs differ as much as these do.

Wilcoxon, "Individual comparisons by ranking methods" (Biometrics Bulletin 1(6), 1945), two-sided, with midranks for
equal values. The distribution is exact for up to 100 values in all: every way to deal the ranks is counted. For more
values it is the normal approximation with corrections for ties and for continuity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

LEVEL = 0.05
"""Chance up to which two combinations are told apart."""
FEWEST = 4
"""Runs of each combination below which nothing is claimed: 3 against 3 differ completely by chance 1 time in 10."""
_EXACT = 100  # values in all up to which the distribution is counted


def p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the chance, from 0 to 1, that equal combinations differ by as much as ``one`` and ``other`` or more."""
    if not one or not other:
        return 1.0
    ranks, sizes = _doubled_ranks([*one, *other])
    number, few = len(ranks), len(one)
    off = abs(sum(ranks[:few]) - few * (number + 1))  # from the expected sum, in halves of a rank
    if number <= _EXACT:
        ways = _ways(sizes, few)
        far = sum(count for total, count in ways.items() if abs(total - few * (number + 1)) >= off)
        return far / math.comb(number, few)
    ties = sum(size**3 - size for size in sizes) / (number * (number - 1))
    variance = few * (number - few) / 12 * (number + 1 - ties)
    step = math.gcd(*(rank - ranks[0] for rank in ranks))  # between two sums
    return 2 * NormalDist().cdf(-max(0.0, off - step / 2) / 2 / math.sqrt(variance)) if variance > 0 else 1.0


def least_p_value(one: int, other: int) -> float:
    """Return the chance that all of ``one`` runs are better than all of ``other`` runs, or all worse."""
    return min(1.0, 2 / math.comb(one + other, one))


def _doubled_ranks(values: Sequence[float]) -> tuple[list[int], tuple[int, ...]]:
    """Twice the midrank of each value, and how many values have each rank, in ascending order."""
    groups = [list(same) for _, same in itertools.groupby(sorted(values))]
    ends = itertools.accumulate(len(same) for same in groups)
    rank_of = {same[0]: 2 * end - len(same) + 1 for same, end in zip(groups, ends, strict=True)}
    return [rank_of[value] for value in values], tuple(len(same) for same in groups)


@lru_cache(maxsize=64)
def _ways(sizes: tuple[int, ...], few: int) -> dict[int, int]:
    """For each sum of doubled ranks, in how many ways ``few`` of the values have that sum."""
    number = sum(sizes)
    width = number  # bits of a count, which is below two to the number of values
    # One large integer for each number of chosen values: the counts for all sums, `width` bits each.
    chosen = [1] + [0] * few
    end = 0
    for size in sizes:
        end += size
        for _ in range(size):
            for at in range(few, 0, -1):
                chosen[at] += chosen[at - 1] << width * (2 * end - size + 1)
    packed, found = chosen[few], dict[int, int]()
    mask = (1 << width) - 1
    for total in range(packed.bit_length() // width + 1):
        if count := packed >> width * total & mask:
            found[total] = count
    return found
