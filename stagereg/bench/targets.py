"""What is to be reached: one table, held against the rows of a run.

The numbers are for a machine with two cores at full scale. What torch does is in the table as it was when the targets
were set, and beside it as it is in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TARGETS", "Noise", "Target", "Verdict", "judge"]


@dataclass(frozen=True)
class Noise:
    """An aim of no more than the noise of the run."""


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
        reach: to be reached, in ``unit``; with :class:`Noise` no more than the noise of the run.
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
    reach: float | Noise
    aim: float | Noise
    unit: str = "x"


@dataclass(frozen=True)
class Verdict:
    """A target beside its figures; ``None`` where a row was not measured."""

    target: Target
    torchs: float | None
    measured: float | None
    mark: str


TARGETS = (
    Target("staging", "warm copy", "large", "pinned_cached", "torch:per_save", "1.6-2.5, per save 5.3", 1.3, 1.05),
    Target("staging", "warm copy", "gpt", "pinned_cached", "torch:per_save", "1.6-2.5, per save 5.8", 1.3, 1.05),
    Target("staging", "20,000 small tensors", "small", "pinned_cached", "torch:kept", "40-77", 8, 5),
    Target("staging", "LoRA, incremental", "lora", "incremental", "torch:kept", "3.6", 0.3, 0.16),
    Target(
        "staging", "first stage of a fresh stager", "large", "first:pinned_cached", "torch:per_save", "5.3-45", 4, 1.8
    ),
    Target(
        "staging", "first stage of a fresh stager", "gpt", "first:pinned_cached", "torch:per_save", "5.3-45", 4, 1.8
    ),
    Target("stall", "blocked in the call", "1", "overlapped+direct", "torch:async_save", "97", 2, 1, "ms blocked"),
    Target("stall", "blocked in the call", "2", "overlapped+direct", "torch:async_save", "66", 2, 1, "ms blocked"),
    Target("stall", "training lost", "1", "overlapped+direct", "torch:async_save", "113", 20, Noise(), "ms lost"),
    Target("stall", "training lost", "2", "overlapped+direct", "torch:async_save", "252", 20, Noise(), "ms lost"),
    Target("write", "durable write", "gpt", "direct:padding", "torch:dcp", "2.6", 1.3, 1.0),
    *(
        Target("join", f"{row}: step", "small/2", row, torchs, today, reach, reach)
        for row, torchs, today, reach in (
            ("planned", "torch:on", "1.31", 1.02),
            ("planned+throw", "torch:throw", "1.60", 1.02),
            ("counted", "torch:on", "1.31", 1.15),
            ("counted+throw", "torch:throw", "1.60", 1.15),
        )
    ),
    *(
        Target(
            "join", f"{row}: enter and leave", "small/2", f"enter+leave:{row}", "enter+leave:torch:on", "0.3-0.7", 1, 1
        )
        for row in ("planned", "counted", "iterate:planned", "iterate:counted")
    ),
    *(
        Target("join", f"{row}: step", "medium/2", row, "torch:on", "1.01", Noise(), Noise())
        for row in ("planned", "counted")
    ),
    *(
        Target("join", f"{row}: collectives", "small/2", row, torchs, today, reach, reach, "collectives")
        for row, torchs, today, reach in (
            ("planned", "torch:on", "2 async", 0),
            ("planned+throw", "torch:throw", "2 async, 1 blocking", 0),
            ("counted", "torch:on", "2 async", 1),
            ("counted+throw", "torch:throw", "2 async, 1 blocking", 1),
        )
    ),
    *(
        Target("join", f"{row}: blocking", "small/2", row, torchs, today, 0, 0, "blocking")
        for row, torchs, today in (("counted", "torch:on", "0"), ("counted+throw", "torch:throw", "1"))
    ),
)
"""All targets. Groups of ``stall`` are numbers of torch threads, those of ``join`` a model and a number of ranks."""


def judge(target: Target, figures: Mapping[tuple[str, str, str], float], noise: float = 0.0) -> Verdict:
    """Hold ``figures``, by group, row and unit, against ``target``, as exactly as they are printed.

    Args:
        noise: of the run, in the target's unit.
    """
    measured = figures.get((target.group, target.row, target.unit))
    torchs = figures.get((target.group, target.torchs, target.unit))
    reach = noise if isinstance(target.reach, Noise) else target.reach
    aim = min(noise, reach) if isinstance(target.aim, Noise) else target.aim
    if measured is None:
        mark = "not measured"
    elif round(measured, 2) <= aim:
        mark = "aim reached"
    elif round(measured, 2) <= reach:
        mark = "reached, aim missed"
    else:
        mark = "missed"
    return Verdict(target, torchs, measured, mark)
