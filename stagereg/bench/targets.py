"""What is to be reached: one table, held against the rows of a run.

The numbers are for a machine with two cores at full scale. What torch does is in the table as it was when the targets
were set, and beside it as it is in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NOISE", "TARGETS", "Target", "Verdict", "judge"]

NOISE = "noise"
"""A figure of no more than the noise of the run."""


@dataclass(frozen=True)
class Target:
    """One figure to be reached.

    Attributes:
        kind: the benchmark that shows it.
        what: a name for people.
        group: the rows' group in that benchmark.
        row: the row that has to reach it.
        torchs: torch's row beside it; empty where there is none.
        today: what torch did when the target was set.
        reach: to be reached, in ``unit``; with :data:`NOISE` no more than the noise of the run.
        aim: to be aimed for.
        unit: ``"x"`` for a ratio to the ceiling, or to the step without a join; ``"ms blocked"`` or ``"ms lost"`` for
            milliseconds; ``"collectives"`` or ``"blocking"`` for how many a step begins beyond those of one without.
    """

    kind: str
    what: str
    group: str
    row: str
    torchs: str
    today: str
    reach: float | str
    aim: float | str
    unit: str = "x"


@dataclass(frozen=True)
class Verdict:
    """A target beside its figures; ``None`` where a row was not measured."""

    target: Target
    torchs: float | None
    measured: float | None
    mark: str


def _stall(what: str, threads: str, today: str, reach: float, aim: float | str, unit: str) -> Target:
    return Target("stall", what, threads, "overlapped+direct", "torch:async_save", today, reach, aim, unit)


def _join(row: str, torchs: str, today: str, reach: float | str, unit: str = "x", group: str = "small/2") -> Target:
    what = f"{row.removeprefix('enter+leave:')}: {'step' if unit == 'x' else unit}"
    if row.startswith("enter+leave:"):
        what = what.replace("step", "enter+leave")
    return Target("join", what, group, row, torchs, today, reach, reach, unit)


_FIRST = "first stage of a stager"
TARGETS = (
    Target("staging", "warm copy", "large", "pinned_cached", "torch:per_save", "1.6-2.5, per save 5.3", 1.3, 1.05),
    Target("staging", "warm copy", "gpt", "pinned_cached", "torch:per_save", "1.6-2.5, per save 5.8", 1.3, 1.05),
    Target("staging", "20,000 small tensors", "small", "pinned_cached", "torch:kept", "40-77", 8, 5),
    Target("staging", "LoRA, incremental", "lora", "incremental", "torch:kept", "3.6", 0.3, 0.16),
    Target("staging", _FIRST, "large", "first:pinned_cached", "torch:per_save", "5.3-45", 4, 1.8),
    Target("staging", _FIRST, "gpt", "first:pinned_cached", "torch:per_save", "5.3-45", 4, 1.8),
    _stall("blocked in the call", "1", "97", 2, 1, "ms blocked"),
    _stall("blocked in the call", "2", "66", 2, 1, "ms blocked"),
    _stall("training lost", "1", "113", 20, NOISE, "ms lost"),
    _stall("training lost", "2", "252", 20, NOISE, "ms lost"),
    Target("write", "durable write", "gpt", "direct:padding", "torch:dcp", "2.6", 1.3, 1.0),
    _join("planned", "torch:on", "1.31", 1.02),
    _join("planned+throw", "torch:throw", "1.60", 1.02),
    _join("counted", "torch:on", "1.31", 1.15),
    _join("counted+throw", "torch:throw", "1.60", 1.15),
    *(
        _join(f"enter+leave:{row}", "enter+leave:torch:on", "0.3-0.7", 1)
        for row in ("planned", "counted", "iterate:planned", "iterate:counted")
    ),
    _join("planned", "torch:on", "1.01", NOISE, group="medium/2"),
    _join("counted", "torch:on", "1.01", NOISE, group="medium/2"),
    _join("planned", "torch:on", "2 async", 0, "collectives"),
    _join("planned+throw", "torch:throw", "2 async, 1 blocking", 0, "collectives"),
    _join("counted", "torch:on", "2 async", 1, "collectives"),
    _join("counted+throw", "torch:throw", "2 async, 1 blocking", 1, "collectives"),
    _join("counted", "torch:on", "0", 0, "blocking"),
    _join("counted+throw", "torch:throw", "1", 0, "blocking"),
)
"""All targets. Groups of ``stall`` are numbers of torch threads, those of ``join`` a model and a number of ranks."""


def judge(target: Target, figures: Mapping[tuple[str, str, str], float], noise: float = 0.0) -> Verdict:
    """Hold ``figures``, by group, row and unit, against ``target``, as exactly as they are printed.

    Args:
        noise: of the run, in the target's unit.
    """
    measured = figures.get((target.group, target.row, target.unit))
    torchs = figures.get((target.group, target.torchs, target.unit))
    reach = noise if isinstance(target.reach, str) else target.reach
    aim = min(noise, reach) if isinstance(target.aim, str) else target.aim
    if measured is None:
        mark = "not measured"
    elif round(measured, 2) <= aim:
        mark = "aim reached"
    elif round(measured, 2) <= reach:
        mark = "reached, aim missed"
    else:
        mark = "missed"
    return Verdict(target, torchs, measured, mark)
