"""Goodput: which part of a run's time was training, over all its attempts, and what the rest went to.

By rank 0's record, from the beginning of the run to the last event there is. The time between two steps is training,
but for what a save held the loop and for steps that had been taken before. From the last step of an attempt to the
first of the next, that step included, it is the phases of a start. What no phase explains is the rest: attempts that
came to no step, and what follows the last step of the run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from stagereg.base.providers import providers
from stagereg.sweep.figures import Covered
from stagereg.sweep.run import RankRecord, Run, Started

PHASES: dict[str, str] = {name: what for each in providers("phases") for name, what in each.PHASES.items()}
"""The phases of a start, in order, and what ends each of them; none where the extension is missing."""


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, in seconds."""

    seconds: float  # of the run, in all
    training: float
    saves: float  # that held the training loop
    again: float  # steps that had been taken before a failure, or a rollback
    starts: float  # from the beginning, or an end in order, to the first step
    restarts: dict[str, float]  # likewise from the last step before a failure, by phase

    @property
    def rest(self) -> float:
        known = (self.training, self.saves, self.again, self.starts, *self.restarts.values())
        return max(0.0, self.seconds - sum(known))

    @property
    def share(self) -> float:
        """The part of the time that was training, from 0 to 1."""
        return self.training / self.seconds if self.seconds else 0.0


def goodput(run: Run) -> Goodput | None:
    """Return where the time of ``run`` went; ``None`` if rank 0 has recorded no step."""
    attempts = _of_rank_0(run)
    if not any(record.steps for record in attempts):
        return None
    parts, restarts = defaultdict[str, float](float), dict.fromkeys(PHASES, 0.0)
    reached = -math.inf
    for record in attempts:
        held = Covered(record.stalls)
        for (step, began), (following, ended) in itertools.pairwise(record.steps):
            reached = max(reached, step)
            stalled = held.within(began, ended)
            parts["saves"] += stalled
            parts["training" if following > reached else "again"] += ended - began - stalled
        reached = max([reached, *(step for step, _ in record.steps[-1:])])
    first, last = attempts[0], attempts[-1]
    if last.steps:  # of others this is in a phase of the next start
        parts["saves"] += Covered(last.stalls).within(last.steps[-1][1], math.inf)
    began = first.first if first.started is None else first.started.since
    for start in failures(run):
        for name, seconds in start.phases.items():
            restarts[name] = restarts.get(name, 0.0) + seconds
    others = sum(start.seconds for start in starts(run) if not start.why)
    restarts = {name: seconds for name, seconds in restarts.items() if seconds}
    return Goodput(last.last - began, parts["training"], parts["saves"], parts["again"], others, restarts)


def starts(run: Run) -> list[Started]:
    """Return how the attempts of ``run`` have come to their first steps, as far as they did."""
    return [record.started for record in _of_rank_0(run) if record.started is not None]


def failures(run: Run) -> list[Started]:
    """Return those of :func:`starts` that followed a failure."""
    return [start for start in starts(run) if start.why]


def _of_rank_0(run: Run) -> list[RankRecord]:
    return [record for each in run.attempts for record in each.ranks if record.rank == 0]
