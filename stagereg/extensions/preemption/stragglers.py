"""Ranks that the others wait for: found by what each has computed in a step, named in the log and in the record.

Ranks that train in step take the same time for each step, whichever of them is slow. What differs is what their
training threads do meanwhile: a slow one computes, or waits for a processor that others use, and the rest sleep in a
collective until it comes. The kernel counts that for each thread. So nothing is measured in a step: the difference is
read once in an exchange that the ranks make anyway (:mod:`.preemption_consensus`), about once a second.

It shows slow and overloaded processors, and programs that do more on one rank. It does not show a rank that sleeps for
something of its own, such as its data loader or its disk, and nothing of accelerators, where the host does not compute.
Whoever is named is left as it is.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import stagereg.base.record as record
from stagereg.errors import name_ranks

_EVERY_S = 0.5  # exchanges that come faster, as those of short steps do, are put together to one
_WINDOW = 20  # such samples that are looked at
_MOST, _FEW = 15, 5
"""In so many of them a rank that is named has been slow, and one that is so no more."""
_OF_STEP = 0.1  # what a slow rank computes longer than others, as a share of the step, at least
_ABOVE_NOISE = 1.5  # ... and in units of its standard deviation over the window.

_log = logging.getLogger(__name__)


class BusyClock:
    """Counts the seconds in which the thread that makes it computes, or waits for nothing but a processor."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = 0.0
        self._counts = not torch.accelerator.is_available()
        self.lap()

    def lap(self) -> float:
        """Return the seconds since the last call, 0 where they are not known. Any thread."""
        if not self._counts:
            return 0.0
        try:
            runs, waits, _ = map(int, self._file.read_text().split())
        except (OSError, ValueError):  # no Linux, or a kernel without it
            self._counts = False
            return 0.0
        now, last = (runs + waits) / 1e9, self._last
        self._last = now
        return now - last


class _Sample(NamedTuple):
    step: int  # the training step before it
    step_s: float  # what a step took
    excess_s: Sequence[float]  # what each rank has computed longer than most, in a step

    def is_slow(self, rank: int) -> bool:
        return self.excess_s[rank] > _OF_STEP * self.step_s


class Stragglers:
    """Those of one run, as rank 0 finds them.

    Args:
        machine_of: returns the name of the machine of a rank; called where one is named.
    """

    def __init__(self, machine_of: Callable[[int], str]) -> None:
        self.named: set[int] = set()  # the ranks that are slow now
        self._machine_of = machine_of
        self._window: deque[_Sample] = deque(maxlen=_WINDOW)
        self._taken: list[Sequence[float]] = []  # in exchanges since the last sample
        self._since = -math.inf

    def add(self, step: int, now: float, step_s: float, busy_s: Sequence[float]) -> None:
        """Take an exchange up to ``step``, at the time ``now``; log and record who is slow, or slow no more.

        ``step_s`` is what a step took, ``busy_s`` what each rank has computed in one; 0 where that is not known.
        """
        if step_s > 0:
            self._taken.append((step_s, *busy_s))
        if not self._taken or now - self._since < _EVERY_S:
            return
        step_s, *busy_s = map(statistics.fmean, zip(*self._taken, strict=True))
        self._taken, self._since = [], now
        known = [each for each in busy_s if each > 0]
        if len(known) < 2:
            return
        usual = statistics.median_low(known)
        self._window.append(_Sample(step, step_s, [each - usual for each in busy_s]))
        if len(self._window) < _WINDOW:
            return
        slow = {rank for rank in range(len(busy_s)) if self._window[-1].is_slow(rank)}
        new = [rank for rank in sorted(slow - self.named) if self._is_persistent(rank)]
        past = [rank for rank in sorted(self.named) if len(self._slow(rank)) <= _FEW]
        self.named = self.named.union(new).difference(past)
        self._tell(new, slow=True)
        self._tell(past, slow=False)

    def _slow(self, rank: int) -> list[_Sample]:
        return [each for each in self._window if each.is_slow(rank)]

    def _is_persistent(self, rank: int) -> bool:
        excess = [each.excess_s[rank] for each in self._window]
        is_clear = statistics.fmean(excess) > _ABOVE_NOISE * statistics.pstdev(excess)
        return is_clear and len(self._slow(rank)) >= _MOST

    def _tell(self, ranks: Sequence[int], slow: bool) -> None:
        """Say of these ranks that they are slow, or no more: a line for each machine, and an event for each rank."""
        last, step_s = self._window[-1].step, statistics.median(each.step_s for each in self._window)
        for machine, those in itertools.groupby(sorted(ranks, key=self._machine_of), self._machine_of):
            here = [*those]
            waits = [statistics.median(each.excess_s[rank] for each in self._window) for rank in here]
            since = min(self._slow(rank)[0].step for rank in here) if slow else last
            is_, it = ("are", "them") if len(here) > 1 else ("is", "it")
            who = f"{name_ranks(here)} on machine {machine} {is_} slow"
            if slow:
                _log.warning(
                    "stagereg: %s: the others wait %.3g ms of each %.3g ms step for %s, since step %d",
                    *(who, 1e3 * max(waits), 1e3 * step_s, it, since),
                )
            else:
                _log.warning("stagereg: %s no more, at step %d", who, last)
            for rank, wait_s in zip(here, waits, strict=True):
                known = {"rank": rank, "machine": machine, "slow": slow, "wait": wait_s, "of": step_s}
                record.emit("straggler", step=since, **known)
