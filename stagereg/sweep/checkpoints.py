"""The checkpoints of one run: what its ranks recorded of each step, put together.

Only reads a run; :mod:`stagereg.sweep.figures` has what checkpoints cost in total.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stagereg.sweep.run import Run, Span

__all__ = ["Saved", "by_checkpoint", "saved"]

_SPANS = ("stalls", "stages", "writes")


@dataclass(frozen=True)
class Saved:
    """One checkpoint of all ranks.

    Attributes:
        step: the training step it was saved at.
        start: when the first rank began to save it, seconds since the start of the run.
        end: the last moment of it that is known, likewise.
        stall_s: how long the slowest rank's training stood still, seconds; ``None`` where no rank recorded it.
        stage_s: how long the slowest rank's copy took, seconds.
        write_s: how long the slowest rank's writing took, seconds.
        nbytes: staged by all ranks.
        state: ``"complete"``; ``"lost"``, with ``error``; ``"not complete"``: the run ended before.
    """

    step: int
    start: float
    end: float
    stall_s: float | None
    stage_s: float | None
    write_s: float | None
    nbytes: int
    state: Literal["complete", "lost", "not complete"]
    error: str = ""


def saved(run: Run) -> list[Saved]:
    """Return the checkpoints of ``run``, in the order in which they were begun."""
    stalls, stages, writes = (by_checkpoint(getattr(rank, name) for rank in run.ranks) for name in _SPANS)
    errors = {step: error for rank in run.ranks for step, error in rank.lost}
    keys = {*stalls, *stages, *writes}
    keys |= {(step, 0) for step in errors if (step, 0) not in keys}
    every = [
        _of(step, run, stalls[step, nth], stages[step, nth], writes[step, nth], errors.get(step)) for step, nth in keys
    ]
    return sorted(every, key=lambda one: (one.start, one.step))


def by_checkpoint(ranks: Iterable[Iterable[Span]]) -> defaultdict[tuple[int, int], list[Span]]:
    """Return the spans of all ranks by step, and by whether it is the first of that step on its rank, the second …"""
    groups: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for spans in ranks:
        seen: Counter[int] = Counter()
        for span in spans:
            groups[span.step, seen[span.step]].append(span)
            seen[span.step] += 1
    return groups


def _of(step: int, run: Run, stalls: list[Span], stages: list[Span], writes: list[Span], error: str | None) -> Saved:
    every = stalls + stages + writes
    start = min((span.start for span in every), default=run.began) - run.began
    end = max((span.end for span in every), default=run.began) - run.began
    nbytes = sum(span.nbytes for span in stages)
    times = _longest(stalls), _longest(stages), _longest(writes)
    if writes:
        return Saved(step, start, end, *times, nbytes, "complete")
    return Saved(step, start, end, *times, nbytes, "not complete" if error is None else "lost", error or "")


def _longest(spans: list[Span]) -> float | None:
    return max((span.seconds for span in spans), default=None)
