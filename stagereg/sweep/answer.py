"""The answer that a sweep ends in: which combination is best, and whether the difference is real."""

from __future__ import annotations

from collections.abc import Sequence

from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import counted

_NAMED = 3  # rows that are named before the rest is counted
_FEW = 3  # runs of a combination from which on a difference beyond their spread is called real


def answer(comparison: Comparison) -> str:
    """Return, in a sentence or two, which combination is best and how far that can be trusted."""
    name = comparison.ranking.name
    best = comparison.best
    if best is None:
        return _none(comparison)
    head = f"Best by {name}: {_measured(comparison, best)}"
    rivals = [row for row in comparison.ranked if row.is_candidate(name) and row is not best]
    if not rivals:
        others = any(row is not best and not row.again for row in comparison.rows)
        why = "no other combination completed all its runs with that figure"
        text = f"{head}; {why if others else 'there is no other combination to compare it with'}."
    elif ties := comparison.ties:
        reasons = dict.fromkeys(row.cells[name].reason for row in ties)
        text = f"{head}; it ties with {_listed(ties)}: {', or '.join(reasons)}."
    else:
        fewest, most = sorted(len(row.cells[name].values) for row in (best, rivals[0]))
        text = f"{head}, before {_measured(comparison, rivals[0])}: {_confidence(fewest, most)}"
    return text + _unreliable(comparison, best)


def _confidence(fewest: int, most: int) -> str:
    """How far a difference beyond the spread can be trusted, by the numbers of runs of the two rows."""
    if fewest == 1:
        once = "one run each" if most == 1 else "one of the two has a single run"
        return f"{once}, so it is unknown whether the difference is real; sweep.repeats=3 would show."
    runs = f"{fewest} runs each" if fewest == most else "their runs"
    trust = "so it is most likely real." if fewest >= _FEW else "but so few prove little; sweep.repeats=5 would help."
    return f"the difference is larger than the spread of {runs}, {trust}"


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


def _unreliable(comparison: Comparison, best: ComparisonRow) -> str:
    """A combination that looks better still, had it not failed in some runs."""
    name, sign = comparison.ranking.name, comparison.ranking.sign
    failing = [row for row in comparison.rows if not row.again and name in row.cells and "failed" in row.status]
    row = min(failing, key=lambda row: sign * row.cells[name].median, default=best)
    if sign * row.cells[name].median >= sign * best.cells[name].median:
        return ""
    return f" {_measured(comparison, row)}, is out: {row.status}."
