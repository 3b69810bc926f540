"""Formats the results of a benchmark as tables, and as JSON with every sample."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import stagereg.base.output as output
from stagereg.bench.measure import Series, spread


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    row: str  # name of the row
    cells: Sequence[str] = ()  # texts of the other columns; empty if the row failed
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by metric: one sample per round
    figures: Mapping[str, float | list[float]] = field(default_factory=dict)  # other metrics: a value, or one per rank
    failure: str = ""


@dataclass(frozen=True)
class Group:
    """Rows that were measured together, so that they can be compared, and the heads of their columns."""

    name: str
    title: str
    heads: Sequence[str]
    lines: Sequence[Line]


def of_series(name: str, title: str, series: Sequence[Series], ceiling: str, peaks: Mapping[str, float]) -> Group:
    """Build a group, with ratios to the row ``ceiling``. ``peaks``: peak memory by row, divided by the state's size."""
    top = next(one for one in series if one.row == ceiling)
    lines = []
    for one in series:
        if not one.samples:
            lines.append(Line(one.row, failure=one.failure))
            continue
        median = statistics.median(one.samples)
        figures = {"ratio": median / statistics.median(top.samples)} if top.samples else {}
        figures |= {"peak": peaks[one.row]} if one.row in peaks else {}
        shown = [f"{figures[key]:9.2f}" if key in figures else "-" for key in ("ratio", "peak")]
        lines.append(Line(one.row, [ms(median), iqr(one.samples, ms), *shown], {"seconds": one.samples}, figures))
    return Group(name, title, ["median ms", "IQR ms", "x ceiling", "peak x state"], lines)


def show(groups: Sequence[Group]) -> None:
    """Print a table for each group, at most 120 columns wide."""
    for group in groups:
        rows = []
        for line in group.lines:
            failed = [*("-" for _ in group.heads[1:]), f"failed: {' '.join(line.failure.split())}"]
            rows.append([line.row, *(line.cells or failed)])
        output.table(group.title, ["row", *group.heads], rows)
        output.echo()


def plain(groups: Sequence[Group]) -> dict[str, Any]:
    """Convert the groups to JSON types, with every sample in seconds."""
    return {"groups": [{"name": each.name, "title": each.title, "rows": [*map(_row, each.lines)]} for each in groups]}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:8.2f}"


def iqr(samples: Sequence[float], shown: Callable[[float], str]) -> str:
    return " - ".join(map(shown, spread(samples)))


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {"row": line.row, **({"failure": line.failure} if line.failure else {})}
    for name, samples in line.samples.items():
        first, third = spread(samples)
        row[name] = {"samples": list(samples), "median": statistics.median(samples), "q1": first, "q3": third}
    return {**row, **line.figures}
