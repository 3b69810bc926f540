"""The answer that a sweep ends in: which combination is best, and whether the difference is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagereg.sweep.metric import counted

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison, ComparisonRow

__all__ = ["Answer", "answer"]

_NAMED = 3
"""Rows that are named before the rest is counted."""
_FEW = 3
"""Runs of a combination from which on a difference beyond their spread is called real."""
_REPEATING = {None, "InterleavedSweeper", "OptunaSweeper"}
"""Sweepers that take ``sweep.repeats``."""


@dataclass(frozen=True)
class Answer:
    """What a comparison shows.

    Attributes:
        text: in a sentence or two.
        difference: whether the difference of the best is real: in a word or two.
        why: the reason for that.
        kind: ``"good"`` where it is, ``"bad"`` where there is no best, else ``"open"``.
    """

    text: str
    difference: str
    why: str
    kind: str = "open"


def answer(comparison: Comparison) -> Answer:
    """Return which combination is best and how far that can be trusted."""
    name = comparison.ranking.name
    best = comparison.best
    if best is None:
        return Answer(_none(comparison), "unknown", f"no combination completed with {name}", "bad")
    head = f"Best by {name}: {_measured(comparison, best)}"
    out = _unreliable(comparison, best)
    rivals = [row for row in comparison.ranked if row.is_candidate(name) and row is not best]
    if not rivals:
        others = any(row is not best and not row.again for row in comparison.rows)
        why = "no other combination completed all its runs with that figure"
        text = f"{head}; {why if others else 'there is no other combination to compare it with'}."
        return Answer(text + out, "not known", "no other combination has this figure in all its runs")
    if ties := comparison.ties:
        reasons = dict.fromkeys(row.cells[name].reason for row in ties)
        text = f"{head}; it ties with {_listed(ties)}: {', or '.join(reasons)}."
        return Answer(text + out, "a tie", f"{counted(len(ties), 'other')} cannot be distinguished from the best")
    head = f"{head}, before {_measured(comparison, rivals[0])}"
    fewest, most = sorted(len(row.cells[name].values) for row in (best, rivals[0]))
    if fewest == 1:
        once = "one run each" if most == 1 else "one of the two has a single run"
        more = _repeated(comparison, 3)
        text = f"{head}: {once}, so it is unknown whether the difference is real; {more} would show."
        return Answer(text + out, "not proven", f"one run has no spread; {more} would have one")
    runs = f"{fewest} runs each" if fewest == most else "their runs"
    text = f"{head}: the difference is larger than the spread of {runs}, "
    if fewest < _FEW:
        text += f"but so few prove little; {_repeated(comparison, 5)} would help."
        return Answer(text + out, "likely", "larger than the spread, but of few runs only")
    return Answer(text + "so it is most likely real." + out, "real", "larger than the spread of the runs", "good")


def _none(comparison: Comparison) -> str:
    name = comparison.ranking.name
    statuses = [job.status for row in comparison.rows for job in row.jobs]
    if "completed" not in statuses:
        failed = statuses.count("failed")
        return f"No answer: of {counted(len(statuses), 'job')}, {failed} failed, {len(statuses) - failed} unfinished."
    if not any(name in row.cells for row in comparison.rows):
        there = ", ".join(one.name for one in comparison.metrics) or "none"
        return f"No answer by {name}: no completed job has that figure. Figures there are: {there}."
    return f"No answer by {name}: every combination that has it failed, or lacks it, in some of its runs."


def _measured(comparison: Comparison, row: ComparisonRow) -> str:
    return f"{row.label}, {comparison.ranking.text(row.cells[comparison.ranking.name].median)}"


def _listed(rows: Sequence[ComparisonRow]) -> str:
    named = [row.label for row in rows[:_NAMED]]
    if len(rows) > _NAMED:
        named.append(f"{len(rows) - _NAMED} more")
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]


def _repeated(comparison: Comparison, times: int) -> str:
    """What would run the combinations so many times."""
    if {job.job.get("sweeper") for row in comparison.rows for job in row.jobs} <= _REPEATING:
        return f"sweep.repeats={times}"
    return f"a sweep of the best ones with hydra/sweeper=interleaved sweep.repeats={times}"


def _unreliable(comparison: Comparison, best: ComparisonRow) -> str:
    """A combination that looks better still, had it not failed in some runs."""
    name, sign = comparison.ranking.name, comparison.ranking.sign
    failing = [row for row in comparison.rows if not row.again and name in row.cells and "failed" in row.status]
    row = min(failing, key=lambda row: sign * row.cells[name].median, default=best)
    if sign * row.cells[name].median >= sign * best.cells[name].median:
        return ""
    return f" {_measured(comparison, row)}, is out: {row.status}."
