"""The steps of a rank as stretches of time, made of the moments at which they ended.

A step begins where the one before it ended, or where the stall that followed that one did; so a stall is no part of a
step. The first begins with the recording, which makes all that was prepared for training a part of it.
"""

from __future__ import annotations

from bisect import bisect_left

from stagereg.sweep.run import RankRecord, Span

__all__ = ["with_data", "without_stalls"]


def without_stalls(record: RankRecord) -> list[Span]:
    """Return the steps of a rank, in the order in which they ended; times are seconds since the epoch."""
    ended = sorted((end, step) for step, end in record.steps)
    stalls = sorted((span.start, span.end) for span in record.stalls)
    last = record.start.get("t", record.first)
    steps = []
    for end, step in ended:
        # The save of a step comes after its end, so at that moment it is no part of it yet.
        before = bisect_left(stalls, (end,))
        begin = min(max(last, stalls[before - 1][1]), end) if before else last
        steps.append(Span(step, begin, end - begin))
        last = end
    return steps


def with_data(record: RankRecord) -> int:
    """How many of the steps of a rank, from its first on, had data; the others were empty, for the others' sake."""
    joined = record.join or {}
    given = int(joined.get("steps", 0))
    return given if joined.get("shadowed") and given < len(record.steps) else len(record.steps)
