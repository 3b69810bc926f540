"""A comparison as text: on the terminal, as CSV with the raw numbers, and as Markdown for a pull request.

All of them, and the page and the pictures too, show the rows in one order and the numbers in one way, defined
here: :func:`ordered`, :func:`verdict`, :func:`number`. The best of a column has a ``*`` and what ties with it a ``~``,
so that no verdict is a matter of colour alone.

On the terminal the number of runs is a column only where rows differ in it. A table that is too wide gives way in this
order: the spread goes below its median, long parameters are folded, and then whole metrics go from the right, never the
one that ranks; a line names what is not shown.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import stagereg.output as output
from stagereg.sweep.answer import sentences
from stagereg.sweep.metric import counted, shown

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
    from stagereg.sweep.metric import Metric

__all__ = [
    "AGAIN",
    "LEGEND",
    "MARKS",
    "TIES",
    "constants",
    "csv_text",
    "distinct",
    "first_line",
    "known",
    "markdown_text",
    "measured",
    "median_text",
    "named",
    "notes",
    "number",
    "ordered",
    "runs",
    "spread_text",
    "terminal",
    "tied",
    "verdict",
]

MARKS = {"best": "*", "tie": "~"}
"""What stands behind the number of a cell with that verdict."""
LEGEND = "* best of its column, ~ ties with it; ± is the spread of the runs (interquartile range)"
TIES = "What ties differs by no more than the spread or the A/A rows do, or has few runs and they overlap"
AGAIN = "A/A is the first combination measured once more, as if it were another one: what it differs by is noise"
_PIECES = re.compile(r"[^\W_]+[\W_]?|[\W_]")
"""What a parameter's text is folded between."""
_NONE = "-"
"""Where there is no number."""
_FOLDS = (0, 40, 24, 14, 10)
"""Characters that a parameter's text may have before it is folded, 0 for any; tried one after the other."""
_INDENT = 2
_GAP = 2
_DRAWN_GAP = 3
"""Between columns in a pipe, and at most on a terminal."""
_NAMED = 2
"""Rows that are named before they are counted."""
_FINER = 4
"""Digits that a median may have beyond three, where its spread is as small."""
_HUGE = 1e9
"""From here on a number is written with an exponent."""


def ordered(comparison: Comparison) -> tuple[ComparisonRow, ...]:
    """Return the rows, best first by the ranking metric; those without a number follow, and those that failed end."""

    def position(row: ComparisonRow) -> tuple[int, float]:
        cell = known(row, comparison.ranking)
        if cell is None:
            return (1 if measured(row) else 2, 0.0)
        return (0, -cell.median if comparison.ranking.better == "higher" else cell.median)

    return tuple(sorted(comparison.rows, key=position))


def distinct(comparison: Comparison) -> dict[str, list[str | None]]:
    """Return what distinguishes rows, by heads: the swept parameters, and the versions where these differ.

    Values are those of the rows as :func:`ordered`; None where a row was not given the parameter.
    """
    rows = ordered(comparison)
    values = {name: [row.parameters.get(name) for row in rows] for name in comparison.parameters}
    return values | ({"versions": [row.versions or None for row in rows]} if any(row.versions for row in rows) else {})


def known(row: ComparisonRow, metric: Metric) -> Cell | None:
    """Return the row's cell for ``metric`` if it has one with a finite number."""
    cell = row.cells.get(metric.name)
    return cell if cell is not None and math.isfinite(cell.median) else None


def measured(row: ComparisonRow) -> bool:
    """Whether there is any number in the row."""
    return any(math.isfinite(cell.median) for cell in row.cells.values())


def tied(rows: Sequence[ComparisonRow]) -> bool:
    """Whether anything ties with the best of a column."""
    return any(cell.verdict == "tie" for row in rows for cell in row.cells.values())


def verdict(row: ComparisonRow, comparison: Comparison) -> str:
    """Return the verdict on a row: best, tie, A/A, failed, unfinished, or none; by the metric that ranks."""
    if not measured(row) and row.status != "completed":
        return "unfinished" if row.status == "unfinished" else "failed"
    if row.again:
        return "A/A"
    cell = known(row, comparison.ranking)
    return cell.verdict if cell else ""


def named(row: ComparisonRow) -> str:
    """Return what the row's jobs were given, as one would type it, and whether it is the A/A row."""
    return f"{row.label} (A/A)" if row.again else row.label


def constants(comparison: Comparison) -> str:
    """Return what all jobs were given alike, as one would type it."""
    return " ".join(comparison.constant)


def runs(row: ComparisonRow) -> str:
    """Return how many runs the row has, and where they ended differently how many of them did not complete."""
    return row.status if " " in row.status else str(len(row.jobs))


def number(value: float) -> str:
    """Return ``value`` in three digits or all before the point; huge ones as 1e9, and a dash for NaN and infinity."""
    if not math.isfinite(value):
        return _NONE
    return f"{value:.3g}" if abs(value) >= _HUGE else shown(value)


def median_text(cell: Cell) -> str:
    """Return the median as :func:`number` has it, or as fine as its spread if that is finer."""
    digits = _places(cell)
    return number(cell.median) if digits is None else f"{cell.median:,.{digits}f}"


def spread_text(cell: Cell) -> str:
    """Return the spread with as many digits behind the point as its median has; empty for one run."""
    if cell.spread is None or not math.isfinite(cell.spread):
        return ""
    digits = _places(cell)
    return f"±{number(cell.spread)}" if digits is None else f"±{cell.spread:,.{digits}f}"


def first_line(error: str) -> str:
    """Return the first line of an error that is not empty."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")


def notes(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """What is to be known of rows, once for all that it is true of."""
    for note in dict.fromkeys(row.note for row in rows if row.note):
        named_rows = [named(row) for row in rows if row.note == note]
        which = " and ".join(named_rows) if len(named_rows) <= _NAMED else f"{len(named_rows)} of {len(rows)} rows"
        yield f"{which}: {note}"


def terminal(comparison: Comparison) -> None:
    """Print the comparison: the table, what failed and why, what to beware of, and last the answer."""
    rows = ordered(comparison)
    if constants(comparison):
        output.echo(f"All with {constants(comparison)}")
    columns, lines, left_out = _fitting(comparison, rows, output.line_width())
    each = f" {counted(comparison.repeats, 'run')} each." if _all_alike(comparison) else ""
    output.table(_title(comparison) + each, columns, lines, verdict="verdict")
    for line in _legend(rows):
        output.echo(f"  {line}.")
    if left_out:
        output.echo(f"  Not shown, for want of space: {', '.join(left_out)}; compare.csv has all.")
    for line in notes(rows):
        output.echo(f"  {line}.")
    for line in _failures(rows):
        output.echo(f"  {line}", "red")
    for warning in comparison.warnings:
        output.echo(f"Beware: {warning}", "yellow")
    output.echo(f"\n{sentences(comparison)}", "bold")


def csv_text(comparison: Comparison) -> str:
    """Return CSV with a head: per row its status, parameters, and per metric median, spread and number of runs, raw.

    What is not known is empty. Columns: ``verdict, status, again``, the swept parameters by name, ``versions`` where
    rows differ in them, ``NAME.median, NAME.spread, NAME.n`` per metric, ``error, note, overrides, directories`` (the
    last two separated by blanks).
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    per_metric = [f"{metric.name}.{what}" for metric in comparison.metrics for what in ("median", "spread", "n")]
    tail = ("error", "note", "overrides", "directories")
    apart = distinct(comparison)
    writer.writerow(("verdict", "status", "again", *apart, *per_metric, *tail))
    for position, row in enumerate(ordered(comparison)):
        cells: list[object] = []
        for metric in comparison.metrics:
            cell = known(row, metric)
            cells += ["", "", 0] if cell is None else [cell.median, _empty(cell.spread), len(cell.values)]
        parameters = [values[position] or "" for values in apart.values()]
        overrides = [*comparison.constant, *(f"{name}={value}" for name, value in row.parameters.items())]
        directories = " ".join(str(job.directory) for job in row.jobs)
        ends = (first_line(row.error), row.note, " ".join(overrides), directories)
        writer.writerow((verdict(row, comparison), row.status, str(row.again).lower(), *parameters, *cells, *ends))
    return stream.getvalue()


def markdown_text(comparison: Comparison) -> str:
    """Return Markdown: the answer, the table, and what failed; parameters and errors are code, so none of them acts."""
    rows = ordered(comparison)
    apart = distinct(comparison)
    heads = ["verdict", *apart, "runs", *(metric.head for metric in comparison.metrics)]
    marks = [":---"] * (1 + len(apart)) + ["---:"] * (1 + len(comparison.metrics))
    lines = [f"**{_escaped(sentences(comparison))}**", "", _markdown_row(map(_escaped, heads)), _markdown_row(marks)]
    for position, row in enumerate(rows):
        cells = [_escaped(verdict(row, comparison))]
        cells += [_code(values[position] or _NONE) for values in apart.values()]
        cells.append(_escaped(runs(row)))
        for metric in comparison.metrics:
            cell = known(row, metric)
            text = _escaped(_one_line(cell)) if cell else _NONE
            cells.append(f"**{text}**" if cell and cell.verdict == "best" else text)
        lines.append(_markdown_row(cells))
    lines += ["", _escaped(" ".join([_title(comparison), *(f"{line}." for line in _legend(rows))]))]
    if comparison.constant:
        lines += ["", f"All with {_code(constants(comparison))}."]
    remarks = [
        f"- {_code(named(row))} ({_escaped(row.status)}): {_code(first_line(row.error))}" for row in rows if row.error
    ]
    remarks += [f"- {_escaped(line)}" for line in notes(rows)]
    lines += ["", *remarks] if remarks else []
    lines += [line for warning in comparison.warnings for line in ("", f"> {_escaped(warning)}")]
    return "\n".join(lines) + "\n"


def _title(comparison: Comparison) -> str:
    better = f", {comparison.ranking.better} is better" if comparison.ranking.better else ""
    return f"{counted(len(comparison.rows), 'row')}, ranked by {comparison.ranking.name}{better}."


def _legend(rows: Sequence[ComparisonRow]) -> list[str]:
    if not any(map(measured, rows)):
        return []
    return [LEGEND, *([TIES] if tied(rows) else []), *([AGAIN] if any(row.again for row in rows) else [])]


def _failures(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    for row in rows:
        if row.error:
            yield f"{named(row)} {row.status}: {first_line(row.error)}"


def _fitting(
    comparison: Comparison, rows: Sequence[ComparisonRow], width: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """The heads and lines of the widest table that fits ``width``, and the names of the metrics that did not."""
    shown = list(comparison.metrics)
    left_out: list[str] = []
    while True:
        for below, fold in [(False, 0), *((True, fold) for fold in _FOLDS)]:
            columns, lines = _drawn(comparison, rows, shown, below, fold)
            if _wide(columns, lines) <= width:
                return columns, lines, left_out
        last = next((one for one in reversed(shown) if one.name != comparison.ranking.name), None)
        if last is None:
            return columns, lines, left_out
        shown.remove(last)
        left_out.insert(0, last.name)


def _drawn(
    comparison: Comparison, rows: Sequence[ComparisonRow], shown: Sequence[Metric], below: bool, fold: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    cells = [_column([known(row, metric) for row in rows], below) for metric in shown]
    heads = [metric.head.replace(" ", "\n", 1) if below else metric.head for metric in shown]
    apart = distinct(comparison)
    names = [_folded(name, fold) for name in apart]
    different = not _all_alike(comparison)
    lines = []
    for position, row in enumerate(rows):
        values = [_folded(one[position] or _NONE, fold) for one in apart.values()]
        counts = ["\n".join(runs(row).rsplit(" ", 1)) if below else runs(row)] if different else []
        lines.append((verdict(row, comparison), *values, *counts, *(column[position] for column in cells)))
    return ("verdict", *names, *(["runs"] if different else []), *heads), lines


def _all_alike(comparison: Comparison) -> bool:
    """Whether every row has as many runs as were asked for; the A/A row has its own number."""
    return all(runs(row) == str(comparison.repeats) for row in comparison.rows if not row.again)


def _column(cells: Sequence[Cell | None], below: bool) -> list[str]:
    """The cells of a column, their numbers and spreads each flush right."""
    medians = [median_text(cell) if cell else _NONE for cell in cells]
    spreads = [spread_text(cell) if cell else "" for cell in cells]
    marks = [MARKS.get(cell.verdict, "") if cell else "" for cell in cells]
    wide, wide_spread = (max(map(len, texts), default=0) for texts in (medians, spreads))
    if below:
        wide = max(wide, wide_spread)
        return [
            f"{median:>{wide}}{mark}" + (f"\n{spread:>{wide}}" if spread else "")
            for median, spread, mark in zip(medians, spreads, marks, strict=True)
        ]
    gap = " " if wide_spread else ""
    return [
        f"{median:>{wide}}{gap}{spread:>{wide_spread}} {mark}".rstrip()
        for median, spread, mark in zip(medians, spreads, marks, strict=True)
    ]


def _wide(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal that the table takes."""
    every = [columns, *lines]
    widest = (max(len(part) for row in every for part in row[i].splitlines() or [""]) for i in range(len(columns)))
    gap = _DRAWN_GAP if sys.stdout.isatty() else _GAP
    return _INDENT + sum(widest) + gap * (len(columns) - 1)


def _folded(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` characters, broken behind a sign if there is one."""
    if not width or len(text) <= width:
        return text
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width))


def _one_line(cell: Cell) -> str:
    return " ".join(part for part in (median_text(cell), spread_text(cell), MARKS.get(cell.verdict, "")) if part)


def _places(cell: Cell) -> int | None:
    """Digits behind the point for median and spread alike; None where one of them needs none."""
    if not cell.spread or not math.isfinite(cell.spread) or not 0 < abs(cell.median) < _HUGE:
        return None
    of_median, of_spread = (
        digits - math.floor(math.log10(abs(x))) for x, digits in ((cell.median, 2), (cell.spread, 0))
    )
    return max(0, of_median, min(of_spread, of_median + _FINER))


def _empty(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value


def _markdown_row(cells: Iterator[str] | Sequence[str] | map[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    flat = " ".join(text.split())
    for sign in "\\`*_|<>[]#@~":
        flat = flat.replace(sign, "&#64;" if sign == "@" else f"\\{sign}")
    return flat


def _code(text: str) -> str:
    """``text`` between more backticks than it has in a row; a bar would end a cell even there, so it is escaped."""
    flat = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in flat).split()), default=0)
    fence = "`" * (longest + 1)
    edge = " " if flat.startswith("`") or flat.endswith("`") or not flat else ""
    return f"{fence}{edge}{flat}{edge}{fence}"
