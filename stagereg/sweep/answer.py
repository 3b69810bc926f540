"""Summarizes the result of a sweep: a headline of at most ten words, and a few sentences with the evidence."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stagereg.sweep.cell import EQUAL, FEW
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import Metric, metric
from stagereg.sweep.number_text import counted, parameter_text, percent
from stagereg.sweep.rank_sum import FEWEST

_CLAIMS = {
    "stall_ms": "stalls training least: {} per checkpoint",
    "lost_percent": "loses least training time: {}",
    "samples_per_s": "trains fastest: {}",
    "staged_gib_per_s": "stages fastest: {}",
    "write_gib_per_s": "writes fastest: {}",
    "peak_host_gib": "needs least host memory: {}",
}
_WORDS = 3  # maximum number of parameters that the headline shows for a combination
_ENOUGH = 10  # number of runs per combination to suggest if fewer runs show no significant difference
_WORD = re.compile(r"(?!(?:true|false|null|none|nan|inf|on|off|yes|no)$)[a-z][\w.:/-]*", re.IGNORECASE)
"""Values that the headline shows without the name of the option, because they are clear alone."""


@dataclass(frozen=True)
class Answer:
    """The summary of a sweep."""

    headline: str  # a sentence of at most ten words
    evidence: tuple[str, ...] = ()  # further sentences
    command: str = ""  # command line that runs the best combination again; empty if unknown

    @property
    def text(self) -> str:
        return " ".join((self.headline, *self.evidence))


def answer(comparison: Comparison) -> Answer:
    """Summarize a comparison: which combination is best and why, or that no difference is significant."""
    name, best = comparison.ranking.name, comparison.best
    if best is None:
        return _none(comparison)
    rivals = [row for row in comparison.ranked if row.is_candidate(name) and row is not best]
    command = next((job.command for job in best.jobs if job.command), "")
    if not rivals:
        alone = not any(row is not best and not row.again for row in comparison.rows)
        why = "There is no other combination" if alone else "No other combination completed all runs with a number"
        headline = f"Nothing to compare: {_value(comparison, best)}."
        return Answer(headline, (f"{why}.", *_unranked(comparison, best)), command)
    if tied := comparison.ties:
        headline, evidence = _undecided(comparison, best, tied)
    else:
        headline = f"{_label(best, rivals[0])} {_claim(comparison.ranking).format(_value(comparison, best))}."
        evidence = [_proof(comparison, best, rivals[0])]
    return Answer(headline, (*evidence, *_noise(comparison, best, rivals[0]), *_unranked(comparison, best)), command)


def _claim(ranking: Metric) -> str:
    usual = f"has the {'lowest' if ranking.sign > 0 else 'highest'} {ranking.head}: {{}}"
    return _CLAIMS.get(ranking.name, usual) if metric(ranking.name).better == ranking.better else usual


def _proof(comparison: Comparison, best: ComparisonRow, rival: ComparisonRow) -> str:
    one, other = best.cells[comparison.ranking.name], rival.cells[comparison.ranking.name]
    low = comparison.ranking.sign > 0
    runs = _runs(len(one.values), len(other.values))
    apart = max(one.values) < min(other.values) if low else min(one.values) > max(other.values)
    all_of = f", all {'lower' if low else 'higher'}" if apart else ""
    chance = f"chance 1 in {math.floor(1 / other.chance):,}" if other.chance > 1e-9 else "chance below 1 in 1e9"
    return f"{_difference(comparison, best, rival)}; {runs}{all_of} ({chance})."


def _undecided(comparison: Comparison, best: ComparisonRow, tied: Sequence[ComparisonRow]) -> tuple[str, list[str]]:
    name = comparison.ranking.name
    tied = sorted(tied, key=lambda row: comparison.ranking.sign * row.cells[name].median)
    first, cells = tied[0], [best.cells[name], *(row.cells[name] for row in tied)]
    runs = min(len(cell.values) for cell in cells)
    counts = _runs(len(cells[0].values), len(cells[1].values))
    others = f"or {_label(first, best)}" if len(tied) == 1 else f"or {counted(len(tied), 'other')}"
    headline = f"Not decided: {_label(best, first)} {others}."
    if all(cell.reason == EQUAL for cell in cells[1:]):
        return headline, [f"They are equal: {_value(comparison, best)}."]
    hint = f"More runs may decide: sweep.repeats={max(_ENOUGH, 2 * runs)}."
    if any(cell.reason == FEW for cell in cells):
        hint = f"At least sweep.repeats={FEWEST} is needed to decide whether the difference is significant."
    elif all(cell.differs_by(cells[0]) <= comparison.matters for cell in cells[1:]):
        hint = f"No difference exceeds {percent(comparison.matters)} (sweep.matters)."
    if cells[1].reason == FEW:
        headline = f"Not decided: {_label(best, first)} leads with {_value(comparison, best)}."
    if cells[1].reason in (FEW, EQUAL):
        return headline, [f"{_difference(comparison, best, first)}; {counts}.", hint]
    one, other = (f"{_label(row, first if row is best else best)} ({_value(comparison, row)})" for row in (best, first))
    spread = max((cell.high - cell.low) / abs(cell.median) if cell.median else 0.0 for cell in cells)
    differ = f"{one} and {other} differ by {percent(cells[0].differs_by(cells[1]))}"
    return headline, [f"{differ}, runs of one combination by {percent(spread)}; {counts}.", hint]


def _difference(comparison: Comparison, best: ComparisonRow, rival: ComparisonRow) -> str:
    one, other = (row.cells[comparison.ranking.name] for row in (best, rival))
    named = f"{_label(rival, best)} ({_value(comparison, rival)})"
    if one.differs_by(other) == 0:
        return f"Equal to {named}"
    word = "less" if comparison.ranking.sign > 0 else "more"
    if min(one.median, other.median) < 0 or not other.median:
        return f"{word.capitalize()} than {named}"
    return f"{percent(abs(one.median - other.median) / other.median)} {word} than {named}"


def _runs(one: int, other: int) -> str:
    return f"{one} run{'s' * (one != 1)} each" if one == other else f"{one} and {other} runs"


def _value(comparison: Comparison, row: ComparisonRow) -> str:
    return comparison.ranking.text(row.cells[comparison.ranking.name].median)


def _label(row: ComparisonRow, other: ComparisonRow) -> str:
    differ = {key: value for key, value in row.parameters.items() if other.parameters.get(key) != value}
    if not differ:
        return row.versions or row.label
    if len(differ) == 1 and _WORD.fullmatch(value := next(iter(differ.values()))):
        return value
    parts = [f"{key}={parameter_text(value)}" for key, value in differ.items()]
    return " ".join([*parts[: _WORDS - 1], "…"] if len(parts) > _WORDS else parts)


def _noise(comparison: Comparison, best: ComparisonRow, rival: ComparisonRow) -> list[str]:
    """Return a sentence about the noise: by how much the A/A row differs from the combination that it repeats."""
    name = comparison.ranking.name
    for row in comparison.rows:
        same = (each for each in comparison.rows if not each.again and each.parameters == row.parameters)
        twin = next((each for each in same if each.versions == row.versions), row)
        if row.again and name in row.cells and name in twin.cells:
            difference = row.cells[name].differs_by(twin.cells[name])
            if math.isfinite(difference):
                label = _label(row, rival if row.parameters == best.parameters else best)
                return [f"{label} differs from itself by {percent(difference)}."]
    return []


def _none(comparison: Comparison) -> Answer:
    name = comparison.ranking.name
    statuses = [job.status for row in comparison.rows for job in row.jobs]
    if "completed" not in statuses:
        failed = statuses.count("failed")
        left = len(statuses) - failed
        ended = f"No answer: {failed} of {counted(len(statuses), 'job')} failed."
        return Answer(ended, (f"{counted(left, 'job')} did not finish.",) if left else ())
    if not any(name in row.cells for row in comparison.rows):
        names = [*(one.name for one in comparison.metrics), *comparison.equal]
        return Answer(f"No answer: no job has {name}.", (f"Available metrics: {', '.join(names) or 'none'}.",))
    why = f"Every combination has at least one run that failed or has no finite {name}."
    return Answer("No answer: no combination completed all its runs.", (why,))


def _unranked(comparison: Comparison, best: ComparisonRow) -> list[str]:
    """Return a sentence about the unranked combination that looks better than the best row, if there is one."""
    name, sign = comparison.ranking.name, comparison.ranking.sign
    rows = [row for row in comparison.rows if not row.again and name in row.cells]
    better = [row for row in rows if sign * row.cells[name].median < sign * best.cells[name].median]
    if not better:
        return []
    row = min(better, key=lambda row: sign * row.cells[name].median)
    why = row.status if row.error else row.note or f"{name} is not finite in all runs"
    return [f"{_label(row, best)} ({_value(comparison, row)}) is not ranked: {why}."]
