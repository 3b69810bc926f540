"""The output of a run: tables for people, one JSON file for programs, and a progress line on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from stagereg.bench.measure import Series, spread
from stagereg.bench.targets import Noise, Verdict

__all__ = ["Group", "Line", "figures", "of_series", "plain", "progress", "tables"]

_WIDTH = 120
_ROW_WIDTH = 27
_HEADS = {
    "seconds": f"{'median ms':>12} {'IQR ms':>21} {'x ceiling':>11}",
    "lost": f"{'blocked ms':>12} {'lost ms':>10} {'IQR ms':>21} {'lost steps':>12}",
    "x": f"{'step ms':>12} {'x off':>9} {'IQR':>15} {'x, p20':>9} {'+ collectives':>14} {'+ blocking':>10}",
}
"""The columns of a table, by a figure that only its rows have."""
_COUNTS = {"collectives": 14, "blocking": 10}
_JOIN_TARGETS = "Targets (x of the step without a join, or collectives a step beyond its own)"
_TARGETS = "Targets (x of the ceiling, or ms)"


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
    """Make a group of rows that are a ratio to the row ``ceiling``."""
    top = next(one for one in series if one.row == ceiling)
    lines = [
        Line(one.row, {"seconds": one.samples}, ratio=one.ratio(top) if top.samples else None)
        if one.samples
        else Line(one.row, missing=one.missing, failure=one.failure)
        for one in series
    ]
    return Group(name, title, lines)


def figures(groups: Sequence[Group]) -> dict[tuple[str, str, str], float]:
    """The figures that targets are held against, by group, row and unit."""
    found: dict[tuple[str, str, str], float] = {}
    for group in groups:
        for line in group.lines:
            if line.ratio is not None:
                found[group.name, line.row, "x"] = line.ratio
            found.update({(group.name, line.row, name): value for name, value in line.figures.items()})
            for name in ("blocked", "lost"):
                if name in line.samples:
                    found[group.name, line.row, f"ms {name}"] = line.median(name) * 1e3
    return found


def tables(groups: Sequence[Group], verdicts: Sequence[Verdict], notes: Sequence[str]) -> str:
    """Plain text of at most 120 columns."""
    parts = ["\n".join([group.title, *_body(group)]) for group in groups]
    if verdicts:
        parts.append("\n".join(_targets(verdicts)))
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def plain(groups: Sequence[Group], verdicts: Sequence[Verdict], notes: Sequence[str]) -> dict[str, Any]:
    """The same and every sample, for JSON; times are seconds."""
    return {
        "groups": [
            {"name": group.name, "title": group.title, "rows": [_row(line) for line in group.lines]} for group in groups
        ],
        "targets": [
            {
                **asdict(v.target),
                "reach": "noise" if isinstance(v.target.reach, Noise) else v.target.reach,
                "aim": _wanted(v.target.aim),
                "torch": v.torchs,
                "measured": v.measured,
                "mark": v.mark,
            }
            for v in verdicts
        ],
        "notes": list(notes),
    }


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


def _body(group: Group) -> list[str]:
    head = next((_HEADS[name] for line in group.lines for name in line.samples if name in _HEADS), _HEADS["seconds"])
    return [f"  {'row':{_ROW_WIDTH}} {head}", *(f"  {line.row:{_ROW_WIDTH}} {_cells(line)}" for line in group.lines)]


def _cells(line: Line) -> str:
    if not line.samples:
        text = f"failed: {line.failure}" if line.failure else f"not there: {line.missing}"
        text = " ".join(text.split())
        width = _WIDTH - _ROW_WIDTH - 5
        return "  " + (text if len(text) <= width else text[: width - 1] + "…")
    if "lost" in line.samples:
        assert line.step_seconds is not None
        lost = line.median("lost")
        steps = f"{lost / line.step_seconds:.2f}"
        return f"{_ms(line.median('blocked')):>12} {_ms(lost):>10} {_iqr(line.samples['lost']):>21} {steps:>12}"
    if "x" in line.samples:
        low, high = (f"{edge:.2f}" for edge in spread(line.samples["x"]))
        row = line.figures
        numbers = " ".join(f"{row.get(name, '-')!s:>{width}}" for name, width in _COUNTS.items())
        return f"{_ms(line.median('step')):>12} {line.ratio:>9.3f} {f'{low} - {high}':>15} {row['p20']:>9.3f} {numbers}"
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
    return f"{_ms(line.median('seconds')):>12} {_iqr(line.samples['seconds']):>21} {ratio:>11}"


def _targets(verdicts: Sequence[Verdict]) -> list[str]:
    wide = max(len("target"), *(len(v.target.group) for v in verdicts))
    head = f"  {'target':32} {'group':{wide}} {'torch then':>21} {'torch here':>10} {'reach':>6} {'aim':>6} {'here':>8}"
    lines = [head + "  mark"]
    for v in verdicts:
        t = v.target
        what = f"{t.what}, ms" if t.unit.startswith("ms ") else t.what
        lines.append(
            f"  {what:32} {t.group:{wide}} {t.today:>21} {_number(v.torchs):>10} {_wanted(t.reach):>6} "
            f"{_wanted(t.aim):>6} {_number(v.measured):>8}  {v.mark}"
        )
    return [_JOIN_TARGETS if verdicts[0].target.kind == "join" else _TARGETS, *lines]


def _wanted(figure: float | Noise) -> str:
    return "noise" if isinstance(figure, Noise) else f"{figure:g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _iqr(samples: Sequence[float]) -> str:
    return " - ".join(_ms(edge) for edge in spread(samples))
