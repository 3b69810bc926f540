"""Formats a comparison as tables for the terminal, and as CSV with unrounded numbers.

The terminal shows only the first rows, wraps long parameters, and omits metrics if a table would be too wide.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import stagereg.base.output as output
from stagereg.errors import printable
from stagereg.sweep.answer import answer
from stagereg.sweep.cell import Cell
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import Metric, metric
from stagereg.sweep.number_text import column_texts, counted, parameter_text, shown

# Definitions of columns whose numbers are not metrics of runs.
RATIO = Metric("vs_best", "vs best", "", "", "The median of the ranking metric, divided by the best row's median.")
RUNS = Metric("runs", "runs", "", "", "Number of runs, or how many of the runs failed or did not finish.")
MARKS = {"best": "*", "tie": "~"}  # by verdict of a cell: the suffix of its number
AGAIN = "the same again"  # name of the A/A row
ALL_TIE = "all tie"  # text in the head of a column in which all rows tie
MOST_ROWS = 15  # maximum number of rows on the terminal and in the plot
_LEGEND = {"best": "* best of its column", "tie": "~ ties with the best"}
RANGES = {False: "minimum to maximum", True: "middle half of the runs"}  # by whether there are more than five runs
_AGAIN = f"{AGAIN.capitalize()} (A/A) repeats the combination above. The two rows differ by noise; A/A is not ranked."
_TO, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
FOLDED = 24  # maximum characters per line of a parameter or column head
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # first characters of formulas, with full-width forms
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
_INDENT = 2  # spaces before a table and between its columns


@dataclass(frozen=True)
class Shown:
    """A cell with its numbers formatted as text."""

    cell: Cell
    text: str  # the median
    range: str  # the low and the high end of the runs; empty if both look equal
    verdict: str  # `"best"`, `"tie"` or empty; always empty in a column in which all rows tie

    @property
    def one_line(self) -> str:
        return f"{self.text} ({self.range})" if self.range else self.text


Value = str | float | int | Shown | None


@dataclass(frozen=True)
class Table:
    """A table for the terminal or the HTML report."""

    title: str
    columns: tuple[str | Metric, ...]  # column heads: strings for text columns, metrics for columns of numbers
    rows: tuple[tuple[Value, ...], ...]  # unformatted values; `None` is an empty cell
    caption: str = ""


def compare_table(comparison: Comparison) -> Table:
    """Return the main table, best row first: verdict, parameters, ranking metric, ratio to the best, other metrics."""
    rows, ranking = comparison.ranked, comparison.ranking
    columns: list[tuple[str | Metric, Sequence[Value]]] = [("verdict", [verdict(comparison, row) for row in rows])]
    for at, name in enumerate(comparison.parameters or ("combination",)):
        columns.append((name, [_given(row, name, at == 0) for row in rows]))
    if any(row.versions for row in rows):
        columns.append(("versions", [row.versions or None for row in rows]))
    if ranking in comparison.metrics:
        columns.append((ranking, shown_cells(comparison, ranking)))
    if any(row.vs_best for row in rows):
        columns.append((RATIO, [_ratio_text(row.vs_best) if row.vs_best else None for row in rows]))
    columns.append((RUNS, [row.status if " " in row.status else len(row.jobs) for row in rows]))
    columns += [(one, shown_cells(comparison, one)) for one in comparison.metrics if one != ranking]
    better = f", {ranking.better} is better" if ranking.better else ""
    title = f"{counted(len(rows), 'row')}, ranked by {ranking.name}{better}."
    constant = f"All with {' '.join(comparison.constant)}" if comparison.constant else ""
    heads, values = zip(*columns, strict=True)
    return Table(title, heads, tuple(zip(*values, strict=True)), constant)


def verdict(comparison: Comparison, row: ComparisonRow) -> str:
    """Return the verdict of a row by the ranking metric, or an empty string if all rows tie."""
    found = row.verdict(comparison.ranking.name)
    return found if found not in MARKS or tells_apart(comparison, comparison.ranking.name) else ""


def tells_apart(comparison: Comparison, name: str) -> bool:
    """Return whether a metric distinguishes rows: at least one row does not tie with the best row."""
    return name not in comparison.undecided and sum(row.is_candidate(name) for row in comparison.rows) > 1


def shown_cells(comparison: Comparison, column: Metric) -> list[Shown | None]:
    """Return the formatted cells of a metric, in the order of ``comparison.ranked``."""
    cells = [row.cells.get(column.name) for row in comparison.ranked]
    texts = iter(column_texts([cell.median for cell in cells if cell]))
    marked = tells_apart(comparison, column.name)
    return [
        Shown(cell, text := next(texts), _range(cell, text), cell.verdict if marked else "") if cell else None
        for cell in cells
    ]


def _range(cell: Cell, text: str) -> str:
    """Format the range of the runs, with the same number of decimal places as ``text``, the median."""
    places = len(text.partition(".")[2])
    low, high = (f"{end:.3g}" if "e" in text else f"{end:,.{places}f}" for end in (cell.low, cell.high))
    return f"{low}{' to ' if '-' in low + high else _TO}{high}" if low != high else ""


def _ratio_text(ratio: float) -> str:
    return f"{f'{ratio:.2f}' if ratio < 10 else shown(ratio)}{_TIMES}"


def _given(row: ComparisonRow, name: str, first: bool) -> str | None:
    """Return the text of a row's parameter ``name``. The A/A row shows "the same again" in the first column instead."""
    if row.again:
        return AGAIN if first else ""
    if not row.parameters:
        return row.label if first else None
    return parameter_text(row.parameters[name]) if name in row.parameters else None


def remarks(comparison: Comparison, rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the lines to print below a table: metrics that are equal in all rows, a legend, and notes on rows."""
    lines = []
    if comparison.equal:
        each = (f"{metric(name).head} {shown(value)}" for name, value in comparison.equal.items())
        lines.append(f"The same in all rows: {', '.join(each)}.")
    if legend := "; ".join(_legend(comparison, rows)):
        lines.append(f"{legend}.")
    lines += [_AGAIN] if any(row.again for row in rows) else []
    lines += [f"{row_name(row)}: {line}." for row in rows for line in (row.note, *_far_off(comparison, row)) if line]
    return lines + [f"{row_name(row)} {row.status}: {first_line(row.error)}" for row in rows if row.error]


def _legend(comparison: Comparison, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    cells = [(one.name, row.cells[one.name]) for one in comparison.metrics for row in rows if one.name in row.cells]
    marked = {one.name for one in comparison.metrics if tells_apart(comparison, one.name)}
    verdicts = {cell.verdict for name, cell in cells if name in marked}
    yield from (text for name, text in _LEGEND.items() if name in verdicts)
    sizes = sorted({len(cell.values) > 5 for _, cell in cells if cell.low < cell.high})
    if sizes:
        more = " (with more than 5 runs the middle half)" if len(sizes) > 1 else ""
        yield f"a{_TO}b {RANGES[sizes[0]]}{more}"


def _far_off(comparison: Comparison, row: ComparisonRow) -> Iterator[str]:
    for one in comparison.metrics:
        if (cell := row.cells.get(one.name)) and (jobs := cell.outliers):
            noun = "job" if len(jobs) == 1 else "jobs"
            outliers = f"{counted(len(jobs), 'outlier')} in {one.head} among {len(cell.values)} runs"
            yield f"{outliers}: {noun} {', '.join(jobs)}"


def row_name(row: ComparisonRow) -> str:
    """Return the combination of a row as Hydra overrides, with a suffix for the A/A row."""
    return f"{row.label}, {AGAIN}" if row.again else row.label


def shortened(text: str, longest: int) -> str:
    """Join a text into one line. If it is longer than ``longest`` characters, replace its middle by an ellipsis."""
    flat = " ".join(text.split())
    if len(flat) <= longest:
        return flat
    head = longest * 2 // 3
    return f"{flat[:head]}…{flat[-(longest - head - 1) :]}"


def first_line(error: str) -> str:
    """Return the first line of an error message that is not blank."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class _Option:
    """A swept option, with the median of the ranking metric for each value of the option.

    A combination of the other options counts only if it ran with every value of this option and has finite results.
    Otherwise, a value that ran only with slow combinations would look slow itself.
    """

    name: str
    medians: dict[str | None, float]  # the median for each value, best first; empty if no combination counts
    runs: dict[str | None, int]  # the number of runs for each value
    counting: int  # number of combinations of the other options that count
    others: int  # number of all combinations of the other options


def _option(comparison: Comparison, name: str) -> _Option:
    found: defaultdict[tuple[object, ...], dict[str | None, list[float]]] = defaultdict(dict)
    for row in comparison.rows:
        cell = row.cells.get(comparison.ranking.name)
        if cell and not row.again and (values := [value for value in cell.values if math.isfinite(value)]):
            others = (row.versions, *(row.parameters.get(each) for each in comparison.parameters if each != name))
            found[others][row.parameters.get(name)] = values
    every = dict.fromkeys(value for values in found.values() for value in values)
    counting = [values for values in found.values() if values.keys() == every.keys()] if len(every) > 1 else []
    of_value = {value: [values[value] for values in counting] for value in every} if counting else {}
    medians = {value: statistics.median(map(statistics.median, several)) for value, several in of_value.items()}
    best_first = sorted(medians.items(), key=lambda each: comparison.ranking.sign * each[1])
    runs = {value: sum(map(len, several)) for value, several in of_value.items()}
    return _Option(name, dict(best_first), runs, len(counting), len(found))


def option_table(comparison: Comparison) -> Table | None:
    """Return a table of the ranking metric for each value of each swept option, or ``None`` if it has no rows."""
    swept = [name for name in comparison.parameters if len({row.parameters.get(name) for row in comparison.rows}) > 1]
    options = [_option(comparison, name) for name in swept] if len(swept) > 1 else []
    texts = iter(column_texts([median for one in options for median in one.medians.values()]))
    rows: list[tuple[Value, ...]] = []
    notes = ["Medians over all combinations of the other options, without a significance test."]
    for one in options:
        for at, (value, median) in enumerate(one.medians.items()):
            best = next(iter(one.medians.values()))
            worse = median / best - 1 if best > 0 else math.nan
            against = "best" if not worse else f"{worse:+.0%}".replace("%", " %") if math.isfinite(worse) else None
            given = "not set" if value is None else parameter_text(value)
            rows.append(("" if at else one.name, given, next(texts), against, one.runs[value]))
        if one.counting < one.others or not one.medians:
            notes.append(
                f"{one.name} is not balanced: of {counted(one.others, 'combination')} of the other options, only "
                f"{one.counting if one.medians else 0} ran with every value of {one.name} and count."
            )
    if not rows:
        return None
    heads = ("option", "value", comparison.ranking.head, "against best", "runs")
    return Table("By option", heads, tuple(rows), " ".join(notes))


def terminal(comparison: Comparison) -> None:
    """Print the comparison: tables, errors, warnings and the summary."""
    table, rows = compare_table(comparison), comparison.ranked[:MOST_ROWS]
    if table.caption:
        output.echo(table.caption)
    ranking, title = comparison.ranking.name, table.title
    values = zip(*table.rows, strict=True)
    columns = [(head, _column(comparison, head, each)) for head, each in zip(table.columns, values, strict=True)]
    if all(len(row.jobs) == comparison.repeats and " " not in row.status for row in comparison.ranked):
        title += f" {counted(comparison.repeats, 'run')} each."
        columns = [each for each in columns if each[0] is not RUNS]
    left_out: list[str] = []
    losable = [each for each in columns if isinstance(each[0], Metric) and each[0].name != ranking]
    while losable and _width([texts for _, texts in columns]) > output.line_width():
        columns.remove(lost := losable.pop())
        left_out.insert(0, lost[0].name if isinstance(lost[0], Metric) else lost[0])
    heads, *lines = zip(*(texts[: MOST_ROWS + 1] for _, texts in columns), strict=True)
    output.table(title, heads, lines, verdict="verdict")
    if more := len(comparison.ranked) - len(rows):
        _paragraph(f"{counted(more, 'more row')}: see compare.csv and report.html.")
    if left_out:
        _paragraph(f"Not shown for lack of space: {', '.join(left_out)}; see compare.csv.")
    for line in remarks(comparison, rows):
        _paragraph(line)
    if options := option_table(comparison):
        output.echo()
        output.table(options.title, list(map(str, options.columns)), [list(map(_folded, row)) for row in options.rows])
        _paragraph(options.caption)
    for warning in comparison.warnings:
        _paragraph(f"Warning: {warning}", "yellow", indent="")
    output.echo()
    _paragraph((found := answer(comparison)).headline, "bold", indent="")
    _paragraph(" ".join(found.evidence), indent="")


def _paragraph(text: str, style: str = "", indent: str = " " * _INDENT) -> None:
    width = max(output.line_width() - len(indent), 20)
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        output.echo(f"{indent}{line}", style)


def _column(comparison: Comparison, head: str | Metric, values: Sequence[Value]) -> list[str]:
    """Format a column for the terminal: the head, then the cells. Numbers are right-aligned, and texts wrapped."""
    if isinstance(head, str):
        return [_folded(text) for text in (head, *values)]
    cells = [(x.text, x.verdict, x.range) if isinstance(x, Shown) else (_folded(x), "", "") for x in values]
    wide, marks = max(len(text) for text, *_ in cells), any(mark in MARKS for _, mark, _ in cells)
    lines = [f"{text:>{wide}}{MARKS.get(mark, ' ') if marks else ''}" for text, mark, _ in cells]
    if head.name == comparison.ranking.name:
        lines = [f"{line} ({ends})" if ends else line for line, (_, _, ends) in zip(lines, cells, strict=True)]
    tie = f"\n{ALL_TIE}" if head.name in comparison.undecided else ""
    return [shortened(head.head, FOLDED).replace(" ", "\n", 1) + tie, *lines]


def _folded(value: Value) -> str:
    return "-" if value is None else "\n".join(textwrap.wrap(str(value), FOLDED))


def _width(columns: Sequence[Sequence[str]]) -> int:
    widest = [max(len(part) for text in column for part in text.splitlines() or [""]) for column in columns]
    return sum(_INDENT + wide for wide in widest)


def csv_text(comparison: Comparison) -> str:
    """Return CSV with a header: verdict, parameters, unrounded metrics, status, error, note and job directories.

    ``NAME.low`` and ``NAME.high`` are the ends of the range in the table. Directories are a JSON list. Unknown values
    are empty. A ``'`` is put before a text that a spreadsheet program would otherwise evaluate as a formula.
    """
    names = [*(one.name for one in comparison.metrics), *comparison.equal]
    names.sort(key=lambda name: name != comparison.ranking.name)
    numbers = [f"{name}.{what}" for name in names for what in ("median", "low", "high", "n")]
    numbers[4:4] = ["vs_best", "runs"]
    last = ("status", "error", "note", "overrides", "directories")
    lines: list[Sequence[Any]] = [("verdict", *comparison.parameters, "versions", *numbers, *last)]
    for row in comparison.ranked:
        raw: list[Any] = []
        for cell in map(row.cells.get, names):
            raw += (cell.median, cell.low, cell.high, len(cell.values)) if cell else (None, None, None, 0)
        raw[4:4] = [row.vs_best, len(row.jobs)]
        overrides = " ".join([*comparison.constant, *(f"{name}={value}" for name, value in row.parameters.items())])
        directories = json.dumps([str(job.directory) for job in row.jobs])
        given = map(row.parameters.get, comparison.parameters)
        about = (row.status, first_line(row.error), row.note, overrides, directories)
        lines.append((verdict(comparison, row), *given, row.versions, *raw, *about))
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([*map(_csv_cell, line)] for line in lines)
    return stream.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    is_formula = value.lstrip().startswith(_FORMULA) and not _NUMBER.fullmatch(value)
    return printable(f"'{value}" if is_formula or value.startswith(("\t", "\r")) else value)
