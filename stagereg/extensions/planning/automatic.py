"""Chooses the checkpoint interval that minimizes the lost time, from the measured cost of checkpoints.

:class:`Automatic` saves after ten steps, then plans the interval again after each save (:mod:`.interval`). The plan
uses measurements of the last few saves: how long each save blocked the loop, how much it slowed down the steps, and how
old the state was when its checkpoint was complete. It also uses the time of a step without a save.

Each rank plans an interval, and all ranks use the longest one: the interval of the slowest rank, for which the other
ranks wait. The ranks exchange their plans in every save, in a separate process group and without waiting. They apply
the result at the next call, so all ranks save at the same steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import median

import torch.distributed as dist

import stagereg.base.record as record
import stagereg.extensions.planning.interval as interval
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.targets import Schedule

_log = logging.getLogger(__name__)

# Steps until the first save of a run, resumed or not. The first few steps compile, allocate and warm up, but the median
# of ten steps is typical, and repeating ten steps costs little.
_FIRST_STEPS = 10
_STEPS = 200  # number of the newest undisturbed steps in the median
# The maximum interval as a multiple of the number of measured steps. The first steps of a run may be too fast: on an
# accelerator, they may only have been queued.
_FORESIGHT = 10
_SAVES = 5  # number of the newest saves in a plan; the plan adapts to a slower disk after this number of saves


class Automatic(Schedule):
    """A save schedule whose interval minimizes the lost time. :class:`.Schedule` documents the methods.

    ``mtbf_s`` returns the mean time between failures in seconds; all ranks use the value of rank 0. ``who``: prefix for
    the log line, such as the name of the tier. ``clock`` returns the current time in seconds.
    """

    def __init__(self, mtbf_s: Callable[[], float], who: str = "", clock: Callable[[], float] = record.now) -> None:
        super().__init__(_FIRST_STEPS)
        self._who, self._clock, self._expected = who, clock, mtbf_s
        self._mtbf_s = 0.0
        self._next: int | None = None
        self._asked: tuple[int, Callable[[], list[float]]] | None = None  # the saved step, and the pending exchange
        self._saves = 0
        self._ended = 0  # written by other threads; this thread writes ``_saves``, so no lock is needed
        self._last: tuple[int, float] | None = None  # the last step, and the time of its end
        self._quiet = True  # whether no save was running at that time
        self._measured = 0  # number of measured steps
        self._undisturbed: deque[float] = deque(maxlen=_STEPS)
        self._beside: list[float] = []
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._ages: deque[float] = deque(maxlen=_SAVES)
        self._logged = 0

    def __str__(self) -> str:
        return "auto"

    def start(self, process_group: dist.ProcessGroup | None) -> None:
        self._ranks = RankGroup(process_group)
        self._mtbf_s = self._ranks.run_on_all("No interval was planned", self._expected)[0]

    @property
    def every(self) -> int:
        self._take_answer()
        return self._every

    def due(self, step: int) -> bool:
        self._take_answer()
        if self._last is not None and step > self._last[0]:
            steps = step - self._last[0]
            self._measured += steps
            times = [(self._clock() - self._last[1]) / steps] * steps
            (self._undisturbed if self._quiet else self._beside).extend(times)
        self._look(step)
        if self._next is None:
            self._next = max(step - 1, 0) + _FIRST_STEPS
        return step >= self._next

    def held(self, step: int, seconds: float) -> None:
        self._take_answer()
        if self._saves == 1:
            self._costs.clear()  # the first save also allocated memory and planned its files
        usual = median(self._undisturbed) if self._undisturbed else 0.0
        slower = sum(self._beside) - usual * len(self._beside) if usual else 0.0
        self._costs.append(seconds + max(0.0, slower))
        self._beside.clear()
        self._saves += 1
        self._next = step + self._every
        self._asked = step, self._ranks.max_async(self._plan(usual))
        self._look(step)

    def ended(self, age: float | None) -> None:
        if age is not None:
            self._ages.append(age)
        self._ended += 1

    def restored(self, step: int) -> None:
        self._take_answer()
        self._next = step + self._every
        self._last = None

    def _look(self, step: int) -> None:
        """Record that the step after ``step`` begins now."""
        self._last = step, self._clock()
        self._quiet = self._saves == self._ended

    def _plan(self, step_s: float) -> list[float]:
        """Return this rank's interval in steps (0 if unknown), the plan's inputs, and the number of measured steps."""
        cost = median(self._costs)
        write = max(self._ages, default=cost)
        steps = 0
        if step_s > 0:
            steps = interval.in_steps(interval.daly(cost, self._mtbf_s), step_s, interval.least(cost, write))
        return [float(steps), cost, write, step_s, float(self._measured)]

    def _take_answer(self) -> None:
        if self._asked is None:
            return
        (saved, answer), self._asked = self._asked, None
        steps, cost, write, step_s, measured = answer()
        self._every = int(min(steps, _FORESIGHT * max(measured, 1))) or self._every
        self._next = saved + self._every
        record.emit("plan", step=saved, every=self._every, cost=cost, write=write, step_seconds=step_s)
        if self._ranks.rank == 0 and not 2 / 3 < self._every / (self._logged or 1) < 3 / 2:
            self._logged = self._every
            _log.info(
                "stagereg: %ssaves every %d steps: a checkpoint costs %.3g s of training and is complete after %.3g s, "
                "a step takes %.3g s, and the expected time between failures is %.3g h",
                *(self._who, self._every, cost, write, step_s, self._mtbf_s / 3600),
            )
