"""A comparison as a table for the terminal, and as CSV with the raw numbers.

The best of a column has a ``*`` and what ties with it a ``~``. On the terminal a spread is below its median, long
parameters are folded, and a table that is too wide loses metrics from the right, but not the ranking one.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import stagereg.output as output
from stagereg.sweep.answer import answer
from stagereg.sweep.cell import Cell
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import Metric, counted, shown

MARKS = {"best": "*", "tie": "~"}  # what stands behind the number of a cell with that verdict
_MARKED = "* best of its column, ~ ties with it; ± is the spread of the runs (interquartile range)."
_TIES = "What ties differs by no more than the spread or the A/A rows do, or has few runs and they overlap."
_AGAIN = "A/A is the first combination measured once more, as if it were another one: what it differs by is noise."
_NONE = "-"  # text of a missing number
_FOLDED = 24  # characters that a parameter's text has in a line
_INDENT, _GAP = 2, 2
"""Columns before a table, and between those of it."""
_FINER = 4  # digits that a median may have beyond three, where its spread is as small

Value = str | float | int | Cell | None


@dataclass(frozen=True)
class Table:
    """A table, whatever shows it."""

    title: str  # its heading
    columns: tuple[str | Metric, ...]  # the heads: texts, or metrics, whose column has cells
    # as many values each as there are columns. Numbers are shown in few digits; `None` is a gap
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""  # a line about it


def compare_table(comparison: Comparison) -> Table:
    """Return the rows of a comparison, best first, with a column for the verdict and for each swept parameter.

    A column has the versions, where rows differ in them, one the number of runs, and then there is one for each metric.
    """
    versions = any(row.versions for row in comparison.rows)
    heads = ["verdict", *comparison.parameters, *(["versions"] if versions else []), "runs"]
    rows: list[tuple[Value, ...]] = []
    for row in comparison.ranked:
        given = [row.parameters.get(name) for name in comparison.parameters]
        given += [row.versions or None] if versions else []
        runs = row.status if " " in row.status else len(row.jobs)
        cells = [row.cells.get(metric.name) for metric in comparison.metrics]
        rows.append((row.verdict(comparison.ranking.name), *given, runs, *cells))
    ranking = comparison.ranking
    better = f", {ranking.better} is better" if ranking.better else ""
    title = f"{counted(len(rows), 'row')}, ranked by {ranking.name}{better}."
    constant = f"All with {' '.join(comparison.constant)}" if comparison.constant else ""
    return Table(title, (*heads, *comparison.metrics), tuple(rows), constant)


def remarks(comparison: Comparison) -> list[str]:
    """Return what stands below the table: what its marks mean, what is special about rows, and why rows failed."""
    rows = comparison.ranked
    cells = [cell for row in rows for cell in row.cells.values()]
    lines = [_MARKED] if cells else []
    lines += [_TIES] if any(cell.verdict == "tie" for cell in cells) else []
    lines += [_AGAIN] if any(row.again for row in rows) else []
    lines += [f"{row_name(row)}: {row.note}." for row in rows if row.note]
    return lines + [f"{row_name(row)} {row.status}: {first_line(row.error)}" for row in rows if row.error]


def row_name(row: ComparisonRow) -> str:
    """Return what the jobs of a row were given, as one would type it, and whether it is the A/A row."""
    return f"{row.label} (A/A)" if row.again else row.label


def cell_texts(cell: Cell) -> tuple[str, str]:
    """Return the median in three digits, or as fine as its spread if that is finer, and the spread, if there is one."""
    spread = cell.high - cell.low if len(cell.values) > 1 else None
    if not spread or not cell.median or "e" in shown(cell.median):
        return shown(cell.median), "" if spread is None else f"±{shown(spread)}"
    of_median = 2 - math.floor(math.log10(abs(cell.median)))
    of_spread = -math.floor(math.log10(spread))
    digits = max(0, of_median, min(of_spread, of_median + _FINER))
    return f"{cell.median:,.{digits}f}", f"±{spread:,.{digits}f}"


def one_line(cell: Cell) -> str:
    return " ".join(cell_texts(cell)).rstrip()


def first_line(error: str) -> str:
    """Return the first line of an error that is not empty."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")


def terminal(comparison: Comparison) -> None:
    """Print the comparison: the table, what failed and why, what to beware of, and last the answer."""
    table, metrics = compare_table(comparison), comparison.metrics
    if table.caption:
        output.echo(table.caption)
    columns = [_column(head, [row[at] for row in table.rows]) for at, head in enumerate(table.columns)]
    names = [""] * (len(columns) - len(metrics)) + [metric.name for metric in metrics]
    title = table.title
    runs = -len(metrics) - 1
    if all(row[runs] == comparison.repeats for row in table.rows if row[0] != "A/A"):
        title += f" {counted(comparison.repeats, 'run')} each."
        del columns[runs], names[0]
    left_out: list[str] = []
    while _width(columns) > output.line_width():
        losable = [at for at, name in enumerate(names) if name not in ("", comparison.ranking.name)]
        if not losable:
            break
        del columns[losable[-1]]
        left_out.insert(0, names.pop(losable[-1]))
    heads, *lines = zip(*columns, strict=True)
    output.table(title, heads, lines, verdict="verdict")
    if left_out:
        output.echo(f"  Not shown, for want of space: {', '.join(left_out)}; compare.csv has all.")
    for line in remarks(comparison):
        output.echo(f"  {line}")
    for warning in comparison.warnings:
        output.echo(f"Beware: {warning}", "yellow")
    output.echo(f"\n{answer(comparison).text}", "bold")


def _column(head: str | Metric, values: Sequence[Value]) -> list[str]:
    """The head and the texts of a column: those of a metric flush right, others folded where they are long."""
    if isinstance(head, str):
        texts = [head, *(_NONE if value is None else str(value) for value in values)]
        return ["\n".join(textwrap.wrap(text, _FOLDED)) for text in texts]
    cells = [cell if isinstance(cell, Cell) else None for cell in values]
    texts_of = [(*cell_texts(cell), MARKS.get(cell.verdict, "")) if cell else (_NONE, "", "") for cell in cells]
    wide = max(len(part) for median, spread, _ in texts_of for part in (median, spread))
    lines = [f"{median:>{wide}}{mark}" + (f"\n{spread:>{wide}}" if spread else "") for median, spread, mark in texts_of]
    return [head.head.replace(" ", "\n", 1), *lines]


def _width(columns: Sequence[Sequence[str]]) -> int:
    widest = [max(len(part) for text in column for part in text.splitlines() or [""]) for column in columns]
    return _INDENT + sum(widest) + _GAP * (len(columns) - 1)


def csv_text(comparison: Comparison) -> str:
    """Return CSV with a head: the columns of the table, with raw numbers, and what else is known of each row.

    What is not known is empty. In the place of a metric are ``NAME.median, NAME.spread, NAME.n``, its runs. At the end
    are ``status, error, note, overrides, directories`` (the last two separated by blanks).
    """
    table = compare_table(comparison)
    heads: list[str] = []
    for head in table.columns:
        heads += [head] if isinstance(head, str) else [f"{head.name}.{what}" for what in ("median", "spread", "n")]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*heads, "status", "error", "note", "overrides", "directories"])
    for row, values in zip(comparison.ranked, table.rows, strict=True):
        raw: list[object] = []
        for head, value in zip(table.columns, values, strict=True):
            if isinstance(head, str):
                raw.append(value)
            else:
                raw += (
                    [value.median, value.high - value.low, len(value.values)]
                    if isinstance(value, Cell)
                    else [None, None, 0]
                )
        overrides = [*comparison.constant, *(f"{name}={value}" for name, value in row.parameters.items())]
        directories = " ".join(str(job.directory) for job in row.jobs)
        writer.writerow([*raw, row.status, first_line(row.error), row.note, " ".join(overrides), directories])
    return stream.getvalue()
