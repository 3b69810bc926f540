"""The output of a run: tables for people, one JSON file for programs, and a progress line on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from stagereg.bench.measure import Series, spread

__all__ = ["Group", "Line", "aligned", "of_series", "plain", "progress", "tables"]

_REASON_WIDTH = 88
_HEADS = {
    "seconds": ["median ms", "IQR ms", "x ceiling"],
    "lost": ["blocked ms", "lost ms", "IQR ms", "lost steps"],
    "x": ["step ms", "x off", "IQR", "x, p20", "+ collectives", "+ blocking"],
}
"""The columns of a table, by a figure that only its rows have."""


@dataclass(frozen=True)
class Line:
    """One row of a table.

    Attributes:
        row: its name.
        samples: seconds of each round by figure, the most important figure first; empty where there are none.
        missing: why it could not be measured here.
        failure: what went wrong.
        ratio: to the ceiling of the same group, or of a join to the row without one.
        step_seconds: of a training step beside which it was measured.
        figures: its other figures, by name.
    """

    row: str
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: str = ""
    failure: str = ""
    ratio: float | None = None
    step_seconds: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def median(self, figure: str) -> float:
        """Seconds."""
        return statistics.median(self.samples[figure])


@dataclass(frozen=True)
class Group:
    """Rows that were measured together and may be compared."""

    name: str
    title: str
    lines: Sequence[Line]


def of_series(name: str, title: str, series: Sequence[Series], ceiling: str) -> Group:
    """Make a group of rows that are a ratio to the row ``ceiling``: median by median, 1.0 is as fast."""
    top = next(one for one in series if one.row == ceiling)
    lines = [
        Line(one.row, {"seconds": one.samples}, ratio=one.median / top.median if top.samples else None)
        if one.samples
        else Line(one.row, missing=one.missing, failure=one.failure)
        for one in series
    ]
    return Group(name, title, lines)


def tables(groups: Sequence[Group], notes: Sequence[str]) -> str:
    """Plain text of at most 120 columns."""
    parts = []
    for group in groups:
        kinds = [name for line in group.lines for name in line.samples if name in _HEADS]
        head = ["row", *_HEADS[kinds[0] if kinds else "seconds"]]
        reasons = {line.row: f"  {line.row}  {_reason(line)}" for line in group.lines if not line.samples}
        rows = iter(aligned([head, *([line.row, *_cells(line)] for line in group.lines if line.samples)]))
        parts.append(
            "\n".join([group.title, next(rows), *(reasons.get(line.row) or next(rows) for line in group.lines)])
        )
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


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


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"row": line.row}
    for name, samples in line.samples.items():
        first, third = spread(samples)
        row[name] = {"samples": list(samples), "median": line.median(name), "q1": first, "q3": third}
    extras = {"ratio": line.ratio, "step": line.step_seconds, "missing": line.missing, "failure": line.failure}
    return row | {name: value for name, value in extras.items() if value not in (None, "")} | dict(line.figures)


def _reason(line: Line) -> str:
    text = " ".join((f"failed: {line.failure}" if line.failure else f"not there: {line.missing}").split())
    return text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 1] + "…"


def _cells(line: Line) -> list[str]:
    if "lost" in line.samples:
        assert line.step_seconds is not None
        lost, blocked = line.median("lost"), line.median("blocked")
        return [_ms(blocked), _ms(lost), _iqr(line.samples["lost"], _ms), f"{lost / line.step_seconds:.2f}"]
    if "x" in line.samples:
        counts = [str(line.figures.get(name, "-")) for name in ("collectives", "blocking")]
        ratios = _iqr(line.samples["x"], "{:.2f}".format)
        return [_ms(line.median("step")), f"{line.ratio:.3f}", ratios, f"{line.figures['p20']:.3f}", *counts]
    return [_ms(line.median("seconds")), _iqr(line.samples["seconds"], _ms), _number(line.ratio)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _iqr(samples: Sequence[float], shown: Callable[[float], str]) -> str:
    return " - ".join(map(shown, spread(samples)))
