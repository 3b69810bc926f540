"""The objective of a search: one figure of a run, or, with a mean time between failures, the time a run would lose.

The stall of a checkpoint does not show how often it is paid. So with a mean time between failures the objective is the
part of its time that a long run would lose in expectation (:func:`stagereg.checkpoint.interval.lost_fraction`), at the
interval of the trial and with what the trial has measured: what a checkpoint takes from training, how long it is on its
way, and how long a step takes. A trial with ``checkpoint.every=auto`` is too short to come to the interval that a long
run would keep to, so it is judged by that one: the best for what it has measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagereg.durations import duration
from stagereg.errors import ConfigError
from stagereg.sweep.metric import RETURNED, Metric, directed
from stagereg.sweep.program import Composed

__all__ = ["EXPECTED", "Objective"]

EXPECTED = "expected_lost_percent"
"""Name of the goal with a mean time between failures."""
_EXPECTED = Metric(
    f"{RETURNED}{EXPECTED}",
    "%",
    "lower",
    "expected lost %",
    "The part of its time that a long run would lose to checkpoints and to failures, in expectation.",
)
_INTERVAL = "checkpoint.every"
_PLANNED_FOR = "checkpoint.mtbf"
"""What ``checkpoint.every=auto`` takes for the time between failures."""
_GIB = 2**30


@dataclass(frozen=True)
class Objective:
    """What to make small, or great.

    Attributes:
        metric: the figure, with the direction it is searched in.
        every: the program's own interval in steps, or ``"auto"``, where it has one.
        mtbf_s: mean time between failures of the whole job, seconds; ``None`` where ``metric`` is a figure of the run.
        planned_for: the program's own mean time between failures, as its config has it; empty where it has none.
    """

    metric: Metric
    every: int | str | None = None
    mtbf_s: float | None = None
    planned_for: str = ""

    @classmethod
    def of(cls, program: Composed, metric: str | None, direction: str | None, mtbf_s: float | None) -> Objective:
        """The goal of a search over ``program``: the stall of a checkpoint where nothing else is asked for.

        Raises:
            ConfigError: there is no such metric or direction, or one that does not go with ``mtbf_s``.
        """
        every = program.get(_INTERVAL)
        every = every if every == "auto" or (isinstance(every, int) and not isinstance(every, bool)) else None
        if mtbf_s is None:
            return cls(directed(metric or "stall_ms", direction), every)
        if metric is not None or direction is not None:
            raise ConfigError(
                "--mtbf is a goal of its own, the time lost in expectation: leave --metric and --direction out."
            )
        if not mtbf_s > 0:
            raise ConfigError("--mtbf is a time between failures, more than 0, as in --mtbf 6h.")
        return cls(_EXPECTED, every, mtbf_s, str(program.get(_PLANNED_FOR) or ""))

    @property
    def maximize(self) -> bool:
        """Whether more of it is better."""
        return self.metric.better == "higher"

    def plain(self) -> dict[str, Any]:
        """All that makes values of it comparable, as JSON has it."""
        direction = "maximize" if self.maximize else "minimize"
        return {"metric": self.metric.name.removeprefix(RETURNED), "direction": direction, "mtbf_s": self.mtbf_s}

    def text(self, value: float) -> str:
        """A value as people read it."""
        return self.metric.text(value)

    def value(self, figures: Mapping[str, float], chosen: Mapping[str, str]) -> float:
        """What a run has come to.

        Args:
            figures: of the run.
            chosen: what it was run with, by key.

        Raises:
            ConfigError: the run has not recorded it; the message has what is missing.
        """
        if self.mtbf_s is not None:
            return self._expected(self.mtbf_s, figures, chosen)
        if self.metric.name in figures:
            return figures[self.metric.name]
        known = ", ".join(figures) or "nothing"
        hint = _NO_CHECKPOINT if not figures.get("checkpoints") else ""
        raise ConfigError(f"it has no {self.metric.name}{hint}, only {known}")

    def _expected(self, mtbf_s: float, figures: Mapping[str, float], chosen: Mapping[str, str]) -> float:
        import stagereg.checkpoint.interval as interval

        every = str(chosen.get(_INTERVAL, self.every))
        if every != "auto" and not every.isdecimal():
            raise ConfigError(f"--mtbf needs a number of steps or auto in {_INTERVAL}, not {every}")
        if not figures.get("checkpoints") or "lost_s" not in figures:
            raise ConfigError(f"it has no cost of a checkpoint{_NO_CHECKPOINT}")
        if not figures.get("step_s"):
            raise ConfigError(f"it has no time of a step{_NO_STEP}")
        rate = figures.get("staged_gib_per_s", 0.0)
        staging_s = figures.get("state_bytes", 0.0) / _GIB / rate if rate else 0.0
        cost_s, write_s = figures["lost_s"] / figures["checkpoints"], staging_s + figures.get("write_s", 0.0)
        if every == "auto":
            planned_for_s = _planned_for_s(chosen.get(_PLANNED_FOR, self.planned_for), mtbf_s)
            taken_s = interval.best(cost_s, planned_for_s, write_s)
            steps = interval.in_steps(taken_s, figures["step_s"], interval.least(cost_s, write_s))
        else:
            steps = int(every)
        return 100 * interval.lost_fraction(steps * figures["step_s"], cost_s, mtbf_s, write_s=write_s)


def _planned_for_s(text: str, otherwise: float) -> float:
    """Seconds between the failures that a run plans for, else those of ``--mtbf``."""
    try:
        return duration(text.strip("'\"")).total_seconds() or otherwise
    except ConfigError:
        return otherwise


_NO_CHECKPOINT = f" (it took no checkpoint: are there more steps than {_INTERVAL}?)"
_NO_STEP = f" (too few steps without a checkpoint under way: are there enough steps, and is {_INTERVAL} long enough?)"
