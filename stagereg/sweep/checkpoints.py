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
    stalls = by_checkpoint(rank.stalls for rank in run.ranks)
    stages = by_checkpoint(rank.stages for rank in run.ranks)
    writes = by_checkpoint(rank.writes for rank in run.ranks)
    errors = {(step, 0): error for rank in run.ranks for step, error in rank.lost}
    every = []
    for key in {*stalls, *stages, *writes, *errors}:
        spans = stalls[key] + stages[key] + writes[key]
        error = errors.get(key, "")
        every.append(
            Saved(
                step=key[0],
                start=min((span.start for span in spans), default=run.began) - run.began,
                end=max((span.end for span in spans), default=run.began) - run.began,
                stall_s=_longest(stalls[key]),
                stage_s=_longest(stages[key]),
                write_s=_longest(writes[key]),
                nbytes=sum(span.nbytes for span in stages[key]),
                state="complete" if writes[key] else "lost" if key in errors else "not complete",
                error="" if writes[key] else error,
            )
        )
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


def _longest(spans: list[Span]) -> float | None:
    return max((span.seconds for span in spans), default=None)
