"""Detects slow ranks by the computing time of each rank per step, and reports them in the log and the event record.

If ranks train in lockstep, each step takes as long as on the slowest rank. The training thread of the slowest rank
computes, or waits for a busy processor, while the training threads of other ranks sleep in a collective. The kernel
counts the computing and waiting time of each thread. The ranks read this counter about once a second and exchange it
together with their signals (:mod:`.consensus`), so steps need no instrumentation.

This method detects slow and overloaded processors, and programs that do more work on one rank. It does not detect a
rank that sleeps, for example because of its data loader or its disk. It also does not detect slow accelerators, because
the host does not compute for them. The run continues with slow ranks.
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

_EVERY_S = 0.5  # minimum seconds of a sample; exchanges in this time are averaged into one sample
_WINDOW = 20  # samples in the window
_MOST, _FEW = 15, 5
"""Slow samples in the window: a rank with at least 15 is reported as slow, and as recovered with at most 5."""
_OF_STEP = 0.1  # minimum excess of a slow rank's computing time, as a fraction of the step
_ABOVE_NOISE = 1.5  # minimum mean excess, in units of its standard deviation over the window

_log = logging.getLogger(__name__)


class BusyClock:
    """Counts the seconds in which the thread that constructs this object computes or waits for a processor."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = 0.0
        self._counts = not torch.accelerator.is_available()
        self.lap()

    def lap(self) -> float:
        """Return the seconds of computing since the last call; 0 if unknown. Called on any thread."""
        if not self._counts:
            return 0.0
        try:
            runs, waits, _ = map(int, self._file.read_text().split())
        except (OSError, ValueError):  # not Linux, or a kernel without this file
            self._counts = False
            return 0.0
        now, last = (runs + waits) / 1e9, self._last
        self._last = now
        return now - last


class _Sample(NamedTuple):
    step: int  # the last training step before the sample
    step_s: float  # seconds per step
    excess_s: Sequence[float]  # seconds per step that each rank computes longer than the median rank

    def is_slow(self, rank: int) -> bool:
        return self.excess_s[rank] > _OF_STEP * self.step_s


class Stragglers:
    """Detects the slow ranks of one run. Used on rank 0.

    ``machine_of`` returns the machine name of a rank; called only for reported ranks.
    """

    def __init__(self, machine_of: Callable[[int], str]) -> None:
        self.named: set[int] = set()  # the ranks that are reported as slow
        self._machine_of = machine_of
        self._window: deque[_Sample] = deque(maxlen=_WINDOW)
        self._taken: list[Sequence[float]] = []  # times of the exchanges since the last sample
        self._since = -math.inf

    def add(self, step: int, now: float, step_s: float, busy_s: Sequence[float]) -> None:
        """Add the times that the ranks exchanged at ``step``. Report ranks that became slow or recovered.

        All times are seconds. ``now``: the current time. ``step_s``: time per step, 0 if unknown. ``busy_s``: computing
        time per step of each rank, 0 if unknown.
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
        """Report ranks that became slow or recovered: a log line for each machine, and an event for each rank."""
        last, step_s = self._window[-1].step, statistics.median(each.step_s for each in self._window)
        for machine, those in itertools.groupby(sorted(ranks, key=self._machine_of), self._machine_of):
            here = [*those]
            waits = [statistics.median(each.excess_s[rank] for each in self._window) for rank in here]
            since = min(self._slow(rank)[0].step for rank in here) if slow else last
            is_, it = ("are", "them") if len(here) > 1 else ("is", "it")
            who = f"{name_ranks(here)} on machine {machine} {is_}"
            if slow:
                _log.warning(
                    "stagereg: %s slow: the others wait %.3g ms of each %.3g ms step for %s, since step %d",
                    *(who, 1e3 * max(waits), 1e3 * step_s, it, since),
                )
            else:
                _log.warning("stagereg: %s no longer slow, at step %d", who, last)
            for rank, wait_s in zip(here, waits, strict=True):
                known = {"rank": rank, "machine": machine, "slow": slow, "wait": wait_s, "of": step_s}
                record.emit("straggler", step=since, **known)
