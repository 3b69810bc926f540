"""A comparison as text: on the terminal, as CSV with the raw numbers, and as Markdown for a pull request.

All of them, and the page and the pictures too, show the rows of one :class:`ComparisonTable`, and numbers in one way.
The best of a column has a ``*`` and what ties with it a ``~``, so that no verdict is a matter of colour alone.

On the terminal a spread stands below its median, long parameters are folded, and the number of runs is a column only
where rows differ in it. A table that is too wide loses metrics from the right, never the one that ranks; a line names
them.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import stagereg.output as output
from stagereg.sweep.answer import sentences
from stagereg.sweep.metric import counted, shown

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
    from stagereg.sweep.metric import Metric

__all__ = [
    "MARKS",
    "ComparisonTable",
    "TableRow",
    "csv_text",
    "first_line",
    "markdown_text",
    "median_text",
    "number",
    "one_line",
    "spread_text",
    "terminal",
]

MARKS = {"best": "*", "tie": "~"}
"""What stands behind the number of a cell with that verdict."""
_MARKED = "* best of its column, ~ ties with it; ± is the spread of the runs (interquartile range)"
_TIES = "What ties differs by no more than the spread or the A/A rows do, or has few runs and they overlap"
_AGAIN = "A/A is the first combination measured once more, as if it were another one: what it differs by is noise"
_NONE = "-"
"""Where there is no number."""
_FOLDED = 24
"""Characters that a parameter's text has in a line."""
_INDENT, _GAP, _DRAWN_GAP = 2, 2, 3
"""Columns before a table, and between those of it in a pipe, and at most on a terminal."""
_NAMED = 2
"""Rows that are named before they are counted."""
_FINER = 4
"""Digits that a median may have beyond three, where its spread is as small."""
_HUGE = 1e9
"""From here on a number is written with an exponent."""


@dataclass(frozen=True)
class TableRow:
    """A row as it is shown.

    Attributes:
        row: what it is made of.
        name: what its jobs were given, as one would type it, and whether it is the A/A row.
        verdict: ``"best"``, ``"tie"``, ``"A/A"``, ``"failed"``, ``"unfinished"`` or empty; by the metric that ranks.
        values: what distinguishes it from other rows, by the heads of the table; ``None`` where it was not given.
        runs: how many it has, and where they ended differently how many of them did not complete.
    """

    row: ComparisonRow
    name: str
    verdict: str
    values: tuple[str | None, ...]
    runs: str


@dataclass(frozen=True)
class ComparisonTable:
    """What all renderings of a comparison have in common.

    Attributes:
        title: how many rows there are and what they are ranked by.
        heads: what distinguishes rows: the swept parameters, and the versions where these differ.
        rows: best first by the metric that ranks; those without it follow, and those without any number come last.
        constant: what all jobs were given alike, as one would type it.
        legend: sentences about the marks that the table has.
        notes: what is to be known of rows, once for all that it is true of.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]
    constant: str
    legend: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, comparison: Comparison) -> ComparisonTable:
        """The table of a comparison."""
        ranking = comparison.ranking
        versions = ("versions",) if any(row.versions for row in comparison.rows) else ()

        def position(shown: TableRow) -> tuple[int, float]:
            cell = shown.row.cells.get(ranking.name)
            if cell is None:
                return (1 if shown.row.cells else 2, 0.0)
            return (0, ranking.sign * cell.median)

        rows = []
        for row in comparison.rows:
            values = [row.parameters.get(name) for name in comparison.parameters]
            values += [row.versions or None] if versions else []
            runs = row.status if " " in row.status else str(len(row.jobs))
            name = f"{row.label} (A/A)" if row.again else row.label
            rows.append(TableRow(row, name, _verdict(row, ranking), tuple(values), runs))
        marked = [_MARKED] if any(row.cells for row in comparison.rows) else []
        tied = [_TIES] if any(cell.verdict == "tie" for row in comparison.rows for cell in row.cells.values()) else []
        again = [_AGAIN] if marked and any(row.again for row in comparison.rows) else []
        better = f", {ranking.better} is better" if ranking.better else ""
        return cls(
            f"{counted(len(rows), 'row')}, ranked by {ranking.name}{better}.",
            (*comparison.parameters, *versions),
            tuple(sorted(rows, key=position)),
            " ".join(comparison.constant),
            tuple(f"{line}." for line in (*marked, *tied, *again)),
            tuple(_notes(rows)),
        )


def _verdict(row: ComparisonRow, ranking: Metric) -> str:
    if not row.cells and row.status != "completed":
        return "unfinished" if row.status == "unfinished" else "failed"
    if row.again:
        return "A/A"
    cell = row.cells.get(ranking.name)
    return cell.verdict if cell else ""


def _notes(rows: Sequence[TableRow]) -> Iterable[str]:
    for note in dict.fromkeys(one.row.note for one in rows if one.row.note):
        names = [one.name for one in rows if one.row.note == note]
        which = " and ".join(names) if len(names) <= _NAMED else f"{len(names)} of {len(rows)} rows"
        yield f"{which}: {note}."


# -- texts of a cell


def number(value: float) -> str:
    """Return ``value`` in three digits or all before the point; huge ones as 1e9."""
    return f"{value:.3g}" if abs(value) >= _HUGE else shown(value)


def median_text(cell: Cell) -> str:
    """Return the median as :func:`number` has it, or as fine as its spread if that is finer."""
    digits = _places(cell)
    return number(cell.median) if digits is None else f"{cell.median:,.{digits}f}"


def spread_text(cell: Cell) -> str:
    """Return the spread with as many digits behind the point as its median has; empty for one run."""
    if cell.spread is None:
        return ""
    digits = _places(cell)
    return f"±{number(cell.spread)}" if digits is None else f"±{cell.spread:,.{digits}f}"


def one_line(cell: Cell) -> str:
    """Return median and spread."""
    return f"{median_text(cell)} {spread_text(cell)}".rstrip()


def first_line(error: str) -> str:
    """Return the first line of an error that is not empty."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")


def _places(cell: Cell) -> int | None:
    """Digits behind the point for median and spread alike; None where one of them needs none."""
    if not cell.spread or not 0 < abs(cell.median) < _HUGE:
        return None
    of_median = 2 - math.floor(math.log10(abs(cell.median)))
    of_spread = -math.floor(math.log10(cell.spread))
    return max(0, of_median, min(of_spread, of_median + _FINER))


# -- the terminal


def terminal(comparison: Comparison) -> None:
    """Print the comparison: the table, what failed and why, what to beware of, and last the answer."""
    table = ComparisonTable.of(comparison)
    if table.constant:
        output.echo(f"All with {table.constant}")
    alike = all(one.runs == str(comparison.repeats) for one in table.rows if not one.row.again)
    metrics = list(comparison.metrics)
    left_out: list[str] = []
    while True:
        columns, lines = _drawn(table, metrics, alike)
        last = next((one for one in reversed(metrics) if one.name != comparison.ranking.name), None)
        if last is None or _width(columns, lines) <= output.line_width():
            break
        metrics.remove(last)
        left_out.insert(0, last.name)
    each = f" {counted(comparison.repeats, 'run')} each." if alike else ""
    output.table(f"{table.title}{each}", columns, lines, verdict="verdict")
    for line in table.legend:
        output.echo(f"  {line}")
    if left_out:
        output.echo(f"  Not shown, for want of space: {', '.join(left_out)}; compare.csv has all.")
    for line in table.notes:
        output.echo(f"  {line}")
    for one in table.rows:
        if one.row.error:
            output.echo(f"  {one.name} {one.row.status}: {first_line(one.row.error)}", "red")
    for warning in comparison.warnings:
        output.echo(f"Beware: {warning}", "yellow")
    output.echo(f"\n{sentences(comparison)}", "bold")


def _drawn(table: ComparisonTable, metrics: Sequence[Metric], alike: bool) -> tuple[list[str], list[list[str]]]:
    """The heads and lines of the table: long texts are folded, and a spread stands below its median."""

    def folded(text: str) -> str:
        return "\n".join(textwrap.wrap(text, _FOLDED))

    columns = [["verdict", *(one.verdict for one in table.rows)]]
    for index, head in enumerate(table.heads):
        columns.append([folded(text) for text in (head, *(one.values[index] or _NONE for one in table.rows))])
    if not alike:
        columns.append(["runs", *("\n".join(one.runs.rsplit(" ", 1)) for one in table.rows)])
    for metric in metrics:
        head = metric.head.replace(" ", "\n", 1)
        columns.append([head, *_column([one.row.cells.get(metric.name) for one in table.rows])])
    heads, *lines = zip(*columns, strict=True)
    return list(heads), [list(line) for line in lines]


def _column(cells: Sequence[Cell | None]) -> list[str]:
    """The cells of a column, their numbers flush right."""
    texts = [
        (median_text(cell), spread_text(cell), MARKS.get(cell.verdict, "")) if cell else (_NONE, "", "")
        for cell in cells
    ]
    wide = max(len(part) for median, spread, _ in texts for part in (median, spread))
    return [f"{median:>{wide}}{mark}" + (f"\n{spread:>{wide}}" if spread else "") for median, spread, mark in texts]


def _width(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal that the table takes."""
    cells = zip(columns, *lines, strict=True)
    widest = [max(len(part) for text in column for part in text.splitlines() or [""]) for column in cells]
    gap = _DRAWN_GAP if sys.stdout.isatty() else _GAP
    return _INDENT + sum(widest) + gap * (len(columns) - 1)


# -- files


def csv_text(comparison: Comparison) -> str:
    """Return CSV with a head: per row its status, parameters, and per metric median, spread and number of runs, raw.

    What is not known is empty. Columns: ``verdict, status, again``, the swept parameters by name, ``versions`` where
    rows differ in them, ``NAME.median, NAME.spread, NAME.n`` per metric, ``error, note, overrides, directories`` (the
    last two separated by blanks).
    """
    table = ComparisonTable.of(comparison)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    per_metric = [f"{metric.name}.{what}" for metric in comparison.metrics for what in ("median", "spread", "n")]
    writer.writerow(
        ["verdict", "status", "again", *table.heads, *per_metric, "error", "note", "overrides", "directories"]
    )
    for one in table.rows:
        row = one.row
        cells: list[object] = []
        for metric in comparison.metrics:
            cell = row.cells.get(metric.name)
            cells += [cell.median, cell.spread, len(cell.values)] if cell else [None, None, 0]
        overrides = [table.constant, *(f"{name}={value}" for name, value in row.parameters.items())]
        directories = " ".join(str(job.directory) for job in row.jobs)
        ends = [first_line(row.error), row.note, " ".join(filter(None, overrides)), directories]
        writer.writerow([one.verdict, row.status, str(row.again).lower(), *one.values, *cells, *ends])
    return stream.getvalue()


def markdown_text(comparison: Comparison) -> str:
    """Return Markdown: the answer, the table, and what failed; parameters and errors are code, so none of them acts."""
    table = ComparisonTable.of(comparison)
    heads = ["verdict", *table.heads, "runs", *(metric.head for metric in comparison.metrics)]
    marks = [":---"] * (1 + len(table.heads)) + ["---:"] * (1 + len(comparison.metrics))
    lines = [f"**{_escaped(sentences(comparison))}**", "", _markdown_row(map(_escaped, heads)), _markdown_row(marks)]
    for one in table.rows:
        cells = [_escaped(one.verdict), *(_code(value or _NONE) for value in one.values), _escaped(one.runs)]
        for metric in comparison.metrics:
            cell = one.row.cells.get(metric.name)
            text = _escaped(f"{one_line(cell)} {MARKS.get(cell.verdict, '')}") if cell else _NONE
            cells.append(f"**{text}**" if cell and cell.verdict == "best" else text)
        lines.append(_markdown_row(cells))
    lines += ["", _escaped(" ".join([table.title, *table.legend]))]
    if table.constant:
        lines += ["", f"All with {_code(table.constant)}."]
    failed = [(one, first_line(one.row.error)) for one in table.rows if one.row.error]
    remarks = [f"- {_code(one.name)} ({_escaped(one.row.status)}): {_code(error)}" for one, error in failed]
    remarks += [f"- {_escaped(line)}" for line in table.notes]
    lines += ["", *remarks] if remarks else []
    lines += [line for warning in comparison.warnings for line in ("", f"> {_escaped(warning)}")]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    flat = " ".join(text.split())
    return re.sub(r"[\\`*_|<>\[\]#~]", r"\\\g<0>", flat).replace("@", "&#64;")


def _code(text: str) -> str:
    """``text`` between more backticks than it has in a row; a bar would end a cell even there, so it is escaped."""
    flat = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    edge = " " if flat.startswith("`") or flat.endswith("`") or not flat else ""
    return f"{fence}{edge}{flat}{edge}{fence}"
