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
    """An aim that is as near to nothing as the run can tell."""


@dataclass(frozen=True)
class Target:
    """One figure to be reached.

    Attributes:
        kind: the benchmark that shows it.
        what: in words.
        group: the rows' group in that benchmark.
        row: the row that has to reach it.
        torchs: torch's row beside it; empty where there is none.
        today: what torch did when the target was set.
        reach: to be reached, ``unit`` says of what.
        aim: to be aimed for.
        unit: ``"x"`` for a ratio to the ceiling, ``"ms blocked"`` or ``"ms lost"`` for milliseconds.
    """

    kind: str
    what: str
    group: str
    row: str
    torchs: str
    today: str
    reach: float
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
    Target("write", "durable write", "gpt", "direct:room", "torch:dcp", "2.6", 1.3, 1.0),
)
"""All targets. The groups of ``stall`` are numbers of torch threads."""


def judge(target: Target, figures: Mapping[tuple[str, str, str], float], noise: float = 0.0) -> Verdict:
    """Hold ``figures``, by group, row and unit, against ``target``, as exactly as they are printed.

    Args:
        noise: what the run cannot tell from nothing, in the target's unit.
    """
    measured = figures.get((target.group, target.row, target.unit))
    torchs = figures.get((target.group, target.torchs, target.unit))
    aim = min(noise, target.reach) if isinstance(target.aim, Noise) else target.aim
    if measured is None:
        mark = "not measured"
    elif round(measured, 2) <= aim:
        mark = "aim reached"
    elif round(measured, 2) <= target.reach:
        mark = "reached, aim missed"
    else:
        mark = "missed"
    return Verdict(target, torchs, measured, mark)
