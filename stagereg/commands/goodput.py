"""Computes goodput, the fraction of a run's time that was spent on training, and where the rest of the time went.

The source is the record of rank 0 over all attempts, from the start of the run to the last event. The time between two
steps counts as training, except stalls by saves, and repeated steps. The time from the last step of an attempt to the
end of the first step of the next attempt is divided into the phases of a start. The rest is the time of attempts
without a step, and the time after the last step of the run.
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
"""The phases of a start, in order: name -> event that ends the phase. Empty if the extension is not installed."""


@dataclass(frozen=True)
class Goodput:
    """How the time of a run was spent, in seconds."""

    seconds: float  # total time of the run
    training: float
    saves: float  # stalls of the training loop by saves
    again: float  # steps repeated after a failure or a rollback
    starts: float  # from a launch, or from a regular exit, to the first step
    restarts: dict[str, float]  # by phase: from the last step before a failure to the first step after it

    @property
    def rest(self) -> float:
        known = (self.training, self.saves, self.again, self.starts, *self.restarts.values())
        return max(0.0, self.seconds - sum(known))

    @property
    def share(self) -> float:
        """The fraction of the time that was spent on training, from 0 to 1."""
        return self.training / self.seconds if self.seconds else 0.0


def goodput(run: Run) -> Goodput | None:
    """Return how the time of ``run`` was spent, or ``None`` if rank 0 recorded no step."""
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
    if last.steps:  # in earlier attempts, the phases of the next start include these stalls
        parts["saves"] += Covered(last.stalls).within(last.steps[-1][1], math.inf)
    began = first.first if first.started is None else first.started.since
    for start in failures(run):
        for name, seconds in start.phases.items():
            restarts[name] = restarts.get(name, 0.0) + seconds
    others = sum(start.seconds for start in starts(run) if not start.why)
    restarts = {name: seconds for name, seconds in restarts.items() if seconds}
    return Goodput(last.last - began, parts["training"], parts["saves"], parts["again"], others, restarts)


def starts(run: Run) -> list[Started]:
    """Return the starts of those attempts of ``run`` that reached a first step."""
    return [record.started for record in _of_rank_0(run) if record.started is not None]


def failures(run: Run) -> list[Started]:
    """Return the starts of ``run`` that came after a failure."""
    return [start for start in starts(run) if start.why]


def _of_rank_0(run: Run) -> list[RankRecord]:
    return [record for each in run.attempts for record in each.ranks if record.rank == 0]
