"""Tables of a page: the text of each head and cell, how it looks and by what it is sorted.

Numbers are sorted as numbers, by all their digits, whatever of them is written. The templates turn this into HTML;
:mod:`stagereg.sweep.render.page` chooses the tables of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import stagereg.sweep.render.tables as tables
from stagereg.sweep.metric import METRICS, counted, in_order, labelled

if TYPE_CHECKING:
    from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
    from stagereg.sweep.metric import Metric

__all__ = ["Shown", "Table", "as_given", "compared", "of_figures"]

_NONE = "-"
_VERDICTS = ("best", "tie", "", "A/A", "unfinished", "failed")
"""In the order in which they are sorted."""
_LONG = 28
"""Characters of a parameter from which on its text is folded."""


@dataclass(frozen=True)
class Table:
    """A table of a page that can be sorted by each column: numbers as numbers, the rest as text, None as a gap, last.

    Attributes:
        title: its heading.
        columns: the heads.
        rows: as many values each as there are columns; floats are written with few digits and sorted with all.
        caption: a line below the heading.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class _Column:
    """A head: its text, also on closer look, and how a first click sorts; ``ranked`` is text with numbers."""

    head: str
    hint: str = ""
    numeric: bool = False
    ranked: bool = False
    first: str = "ascending"
    sorted: str = ""


@dataclass(frozen=True)
class _Cell:
    """A cell: its text, a smaller text behind it, and the key it is sorted by, None for a gap."""

    text: str
    small: str = ""
    key: str | None = None
    mark: str = ""
    verdict: str = ""
    hint: str = ""
    code: bool = False
    chip: bool = False
    numeric: bool = False
    error: bool = False
    long: bool = False
    span: int = 1


@dataclass(frozen=True)
class _Line:
    """A row; one of kind ``last`` stays below the others however they are sorted."""

    cells: tuple[_Cell, ...]
    kind: str = ""
    last: bool = False


@dataclass(frozen=True)
class Shown:
    """What a template draws as a table."""

    label: str
    columns: tuple[_Column, ...]
    lines: tuple[_Line, ...]
    caption: str = ""


def compared(comparison: Comparison, rows: Sequence[ComparisonRow]) -> Shown:
    """Return the table of a sweep: its rows as ``tables.ordered`` has them."""
    ranking = comparison.ranking
    columns = [_Column("verdict", ranked=True)]
    apart = tables.distinct(comparison)
    numeric = {name: _all_numbers(values) for name, values in apart.items()}
    columns += [_Column(name, numeric=numeric[name]) for name in apart]
    columns.append(_Column("runs", numeric=True))
    for metric in comparison.metrics:
        first = "descending" if metric.better == "higher" else "ascending"
        now = first if metric.name == ranking.name else ""
        columns.append(_Column(metric.head, _hint(metric), numeric=True, first=first, sorted=now))
    if not comparison.metrics:
        columns.append(_Column("error"))
    given = ([(values[index], numeric[name]) for name, values in apart.items()] for index in range(len(rows)))
    lines = tuple(_comparison_line(row, comparison, one) for row, one in zip(rows, given, strict=True))
    caption = f"{counted(len(rows), 'row')}, ranked by {ranking.name}"
    return Shown("Comparison", tuple(columns), lines, caption)


def _comparison_line(row: ComparisonRow, comparison: Comparison, given: Iterable[tuple[str | None, bool]]) -> _Line:
    """The line of a row, which values distinguish from others; each of them is a number, or is not."""
    kind = tables.verdict(row, comparison)
    cells = [_Cell(kind, key=str(_VERDICTS.index(kind)), chip=bool(kind), verdict=kind)]
    for value, numeric in given:
        text = _NONE if value is None else value
        cells.append(_Cell(text, key=value, code=True, numeric=numeric, long=len(text) > _LONG))
    done = sum(job.status == "completed" for job in row.jobs)
    cells.append(_Cell(tables.runs(row), key=str(done), numeric=True, hint=row.note, mark="†" if row.note else ""))
    if not tables.measured(row):
        shown = tables.first_line(row.error) or ("no end recorded" if kind == "unfinished" else "")
        cells.append(_Cell(shown, error=True, span=max(1, len(comparison.metrics))))
        return _Line(tuple(cells), kind, last=row.status != "completed")
    cells += [_metric_cell(tables.known(row, metric)) for metric in comparison.metrics]
    return _Line(tuple(cells), kind)


def _metric_cell(cell: Cell | None) -> _Cell:
    if cell is None:
        return _Cell(_NONE, numeric=True)
    return _Cell(
        tables.median_text(cell),
        small=tables.spread_text(cell),
        key=repr(cell.median),
        mark=tables.MARKS.get(cell.verdict, ""),
        verdict=cell.verdict,
        hint=f"{counted(len(cell.values), 'run')}: {', '.join(map(tables.number, cell.values))}",
        numeric=True,
    )


def _hint(metric: Metric) -> str:
    better = f" {metric.better.capitalize()} is better." if metric.better else ""
    unit = f" In {metric.unit}." if metric.unit else ""
    return f"{metric.name}: {metric.doc.rstrip('.')}.{unit}{better}"


def as_given(table: Table) -> Shown:
    """Return a table of values that were made elsewhere."""
    numeric = [_numbers(row[index] for row in table.rows) for index in range(len(table.columns))]
    columns = tuple(_Column(head, numeric=one) for head, one in zip(table.columns, numeric, strict=True))
    lines = tuple(
        _Line(tuple(_plain_cell(value, one) for value, one in zip(row, numeric, strict=True))) for row in table.rows
    )
    return Shown(table.title, columns, lines, table.caption)


def _plain_cell(value: str | float | int | None, numeric: bool) -> _Cell:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _Cell(_NONE, numeric=numeric)
    text = value if isinstance(value, str) else tables.number(value)
    return _Cell(text, key=value if isinstance(value, str) else repr(value), numeric=numeric)


def of_figures(figures: Mapping[str, float]) -> Shown:
    """Return the figures of a run, with what they are."""
    docs = {metric.name: f"{metric.doc.rstrip('.')}." for metric in METRICS}
    lines = []
    for name in in_order(figures):
        head, value, unit = labelled(name, figures[name])
        doc = docs.get(name, "")
        lines.append(
            _Line(
                (
                    _Cell(head, key=head, code=name in docs),
                    _Cell(tables.number(value), key=repr(value), numeric=True),
                    _Cell(unit, key=unit or None),
                    _Cell(doc, key=doc or None),
                )
            )
        )
    columns = (_Column("figure"), _Column("value", numeric=True), _Column("unit"), _Column("what it is"))
    return Shown("Figures", columns, tuple(lines))


def _all_numbers(texts: Iterable[str | None]) -> bool:
    """Whether all texts there are read as numbers."""

    def reads(text: str) -> bool:
        try:
            return math.isfinite(float(text))
        except ValueError:
            return False

    return all(reads(text) for text in texts if text is not None)


def _numbers(values: Iterable[str | float | int | None]) -> bool:
    return not any(isinstance(value, str) for value in values)
