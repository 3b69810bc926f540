"""The output of a run: tables for people, one JSON file for programs, and a progress line on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from stagereg.bench.measure import Series, spread

__all__ = ["Group", "Line", "aligned", "iqr", "ms", "of_series", "plain", "progress", "tables"]

_REASON_WIDTH = 88


@dataclass(frozen=True)
class Line:
    """One row of a table.

    Attributes:
        row: its name.
        cells: its other columns; none if it could not be measured.
        samples: of each round by figure.
        figures: its other figures, by name.
        failure: what went wrong.
    """

    row: str
    cells: Sequence[str] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Group:
    """Rows that were measured together and may be compared, and the heads of their columns."""

    name: str
    title: str
    heads: Sequence[str]
    lines: Sequence[Line]


def of_series(name: str, title: str, series: Sequence[Series], ceiling: str) -> Group:
    """Make a group of rows that are a ratio to the row ``ceiling``: median by median, 1.0 is as fast."""
    top = next(one for one in series if one.row == ceiling)
    lines = []
    for one in series:
        if not one.samples:
            lines.append(Line(one.row, failure=one.failure))
            continue
        figures = {"ratio": one.median / top.median} if top.samples else {}
        ratio = f"{figures['ratio']:.2f}" if figures else "-"
        cells = [ms(one.median), iqr(one.samples, ms), ratio]
        lines.append(Line(one.row, cells, {"seconds": one.samples}, figures))
    return Group(name, title, ["median ms", "IQR ms", "x ceiling"], lines)


def tables(groups: Sequence[Group], notes: Sequence[str]) -> str:
    """Plain text of at most 120 columns."""
    parts = []
    for group in groups:
        measured = [line for line in group.lines if line.cells]
        rows = iter(aligned([["row", *group.heads], *([line.row, *line.cells] for line in measured)]))
        lines = [next(rows), *(next(rows) if line.cells else f"  {line.row}  {_reason(line)}" for line in group.lines)]
        parts.append("\n".join([group.title, *lines]))
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text in columns, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(["", f"{first:{widths[0]}}", *cells]))
    return lines


def plain(groups: Sequence[Group], notes: Sequence[str]) -> dict[str, Any]:
    """The same and every sample, for JSON; times are seconds."""
    shown = [
        {"name": group.name, "title": group.title, "rows": [_row(line) for line in group.lines]} for group in groups
    ]
    return {"groups": shown, "notes": list(notes)}


def progress(what: str, rounds: int, stream: TextIO) -> Callable[[int], None]:
    """Return a function that shows the number of the round, if ``stream`` is a terminal."""

    def show(number: int) -> None:
        if stream.isatty():
            end = "\r\033[K" if number == rounds else ""
            print(f"\r\033[K{what}: round {number} of {rounds}{end}", end="", file=stream, flush=True)

    return show


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.2f}"


def iqr(samples: Sequence[float], shown: Callable[[float], str]) -> str:
    """The quartiles of some samples."""
    return " - ".join(map(shown, spread(samples)))


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"row": line.row, **({"failure": line.failure} if line.failure else {})}
    for name, samples in line.samples.items():
        first, third = spread(samples)
        row[name] = {"samples": list(samples), "median": statistics.median(samples), "q1": first, "q3": third}
    return {**row, **line.figures}


def _reason(line: Line) -> str:
    text = " ".join(f"failed: {line.failure}".split())
    return text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 1] + "…"
