"""The sentence a sweep ends in: which combination is best, and whether the difference is real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Comparison, ComparisonRow
    from stagereg.sweep.result import JobResult

__all__ = ["Confidence", "confidence", "repeated", "sentences"]

_NAMED = 3
"""Rows that are named before the rest is counted."""
_FEW = 3
"""Runs of a combination from which on a difference beyond their spread is called real."""


class Confidence(Enum):
    """What is known of the difference between the best and the next."""

    NO_BEST = "no best"
    ALONE = "alone"
    TIE = "tie"
    ONCE = "once"
    FEW = "few"
    REAL = "real"


def confidence(comparison: Comparison) -> Confidence:
    """Return how far the answer can be trusted."""
    best = comparison.best
    if best is None:
        return Confidence.NO_BEST
    if (following := _following(comparison, best)) is None:
        return Confidence.ALONE
    if comparison.ties:
        return Confidence.TIE
    fewest = min(len(row.cells[comparison.ranking.name].values) for row in (best, following))
    return Confidence.ONCE if fewest == 1 else Confidence.FEW if fewest < _FEW else Confidence.REAL


def repeated(comparison: Comparison, times: int) -> str:
    """Return what would run the combinations so many times."""
    if comparison.repeatable:
        return f"sweep.repeats={times}"
    return f"a sweep of the best ones with hydra/sweeper=interleaved sweep.repeats={times}"


def sentences(comparison: Comparison) -> str:
    """Return one sentence, or two."""
    best = comparison.best
    return _none(comparison) if best is None else " ".join(_about(comparison, best))


def _none(comparison: Comparison) -> str:
    name = comparison.ranking.name
    jobs = [job for row in comparison.rows for job in row.jobs]
    if not any(job.status == "completed" for job in jobs):
        return f"No answer: {_ended(jobs)}."
    if not any(name in row.cells for row in comparison.rows):
        there = ", ".join(one.name for one in comparison.metrics)
        others = f". Figures there are: {there}." if there else ", nor any other."
        return f"No answer by {name}: no completed job has that figure{others}"
    return f"No answer by {name}: every combination that has it failed, or lacks it, in some of its runs."


def _ended(jobs: Sequence[JobResult]) -> str:
    """What became of jobs none of which completed."""
    failed = sum(job.status == "failed" for job in jobs)
    unfinished = len(jobs) - failed
    every = {1: "the only job", 2: "both jobs"}.get(len(jobs), f"all {len(jobs)} jobs")
    if not unfinished:
        return f"{every} failed"
    be = "is" if unfinished == 1 else "are"
    if not failed:
        return f"{every} {be} unfinished"
    return f"of {len(jobs)} jobs, {failed} failed and {unfinished} {be} unfinished"


def _about(comparison: Comparison, best: ComparisonRow) -> Iterator[str]:
    ranking, ties = comparison.ranking, comparison.ties
    rivals = [row for row in comparison.candidates if row is not best]
    head = f"Best by {ranking.name}: {_first_of(comparison, best)}"
    if not rivals:
        others = any(row is not best and not row.again for row in comparison.rows)
        why = "no other combination completed all its runs with that figure"
        yield f"{head}; {why if others else 'there is no other combination to compare it with'}."
    elif ties:
        yield f"{head}; it ties with {_others(ties, rivals)}: {_because(comparison, best, ties)}."
    else:
        yield _apart(comparison, head, best)
    yield from _unreliable(comparison, best)


def _first_of(comparison: Comparison, row: ComparisonRow) -> str:
    return f"{row.label}, {comparison.ranking.text(row.cells[comparison.ranking.name].median)}"


def _others(ties: Sequence[ComparisonRow], rivals: Sequence[ComparisonRow]) -> str:
    if len(ties) > _NAMED and len(ties) == len(rivals):
        return f"all {len(ties)} others"
    rest = len(ties) - _NAMED
    named = [row.label for row in (ties[:_NAMED] if rest > 1 else ties)]
    if rest > 1:
        named.append(f"{rest} more")
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]


def _because(comparison: Comparison, best: ComparisonRow, ties: Sequence[ComparisonRow]) -> str:
    from stagereg.sweep.comparison import Tie

    reasons = {comparison.tie(best, row) for row in ties}
    if reasons == {Tie.EQUAL}:
        return "the figures are equal"
    if Tie.OVERLAP in reasons:
        return (
            "their runs overlap" if len(reasons) == 1 else "the difference is smaller than the spread, or runs overlap"
        )
    if reasons == {Tie.NOISE}:
        return "the difference is smaller than that between two sets of runs of one combination"
    return "the difference is smaller than the spread"


def _apart(comparison: Comparison, head: str, best: ComparisonRow) -> str:
    """No rival ties with the best: how far can that be trusted?"""
    following = _following(comparison, best)
    assert following is not None
    counts = sorted({len(row.cells[comparison.ranking.name].values) for row in (best, following)})
    trusted = confidence(comparison)
    if trusted is Confidence.ONCE:
        once = "one run each" if counts == [1] else "one of the two has a single run"
        text = f"{once}, so it is unknown whether the difference is real; {repeated(comparison, _FEW)} would show"
    else:
        each = f"{counts[0]} runs each" if len(counts) == 1 else "their runs"
        text = f"the difference is larger than the spread of {each}, "
        text += (
            "so it is most likely real"
            if trusted is Confidence.REAL
            else f"but so few prove little; {repeated(comparison, 5)} would help"
        )
    return f"{head}, before {_first_of(comparison, following)}: {text}."


def _following(comparison: Comparison, best: ComparisonRow) -> ComparisonRow | None:
    """The row that would be the best without the best."""
    name = comparison.ranking.name
    sign = -1 if comparison.ranking.better == "higher" else 1
    rivals = (row for row in comparison.candidates if row is not best)
    return min(rivals, key=lambda row: sign * row.cells[name].median, default=None)


def _unreliable(comparison: Comparison, best: ComparisonRow) -> Iterator[str]:
    """A combination that looks better still, had it not failed in some runs."""
    name = comparison.ranking.name
    sign = -1 if comparison.ranking.better == "higher" else 1
    failing = [row for row in comparison.rows if not row.again and name in row.cells and "failed" in row.status]
    better = [row for row in failing if sign * row.cells[name].median < sign * best.cells[name].median]
    if better:
        row = min(better, key=lambda row: sign * row.cells[name].median)
        yield f"{_first_of(comparison, row)}, is out: {row.status}."
