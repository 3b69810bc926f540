"""Draws a comparison: one panel for each metric, which shows every run of the first rows in table order.

The colours are distinguishable for colour-blind readers (after Okabe and Ito, https://jfly.uni-koeln.de/color/). The
same comparison gives the same bytes, regardless of the user's matplotlibrc. Matplotlib is imported on first use.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stagereg.errors import printable
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import Metric
from stagereg.sweep.number_text import parameter_text
from stagereg.sweep.render.tables import AGAIN, ALL_TIE, MOST_ROWS, RANGES, first_line, shortened, shown_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "font.size": 9.0,
    "grid.color": "#dde2e8",
    "legend.frameon": False,
    "savefig.dpi": 144.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "stagereg",
    "ytick.major.size": 0.0,
}
_SHAPES = {
    "best": ("*", "#0072b2", "best"),
    "tie": ("D", "#3d9bd6", "ties with the best"),
    "A/A": ("s", "#b87900", f"{AGAIN} (A/A)"),
    "": ("o", "#7d8794", "median"),
}
"""By verdict of a row: marker, colour and legend of its median."""
_ONE_RUN = "one run"
_FAILED = "#c4480c"
_ACROSS = 5  # maximum number of small panels side by side
_MANY = 10  # from this number of lines on, lines are less high
_LONGEST = 42  # maximum number of characters in the label of a row
_TITLES = {1: 80, 2: 38, 3: 24, 4: 18, 5: 15}  # maximum characters of a panel title, by number of panels side by side
_LOGARITHMIC = 30.0  # The scale is logarithmic if the largest value is at least this number of times the smallest.


def compare_figure(comparison: Comparison) -> Figure | None:
    """Return the plot of ``comparison``, or ``None`` if no metric has a value.

    If no row has the ranking metric, the main panel shows the first metric.
    """
    rows = comparison.ranked[:MOST_ROWS]
    small = list(comparison.metrics)
    if not small:
        return None
    from matplotlib.figure import Figure

    names = [metric.name for metric in small]
    main = small.pop(names.index(comparison.ranking.name) if comparison.ranking.name in names else 0)
    across = math.ceil(len(small) / (math.ceil(len(small) / _ACROSS) or 1)) or 1
    lines = len(rows) + (len(comparison.ranked) > len(rows))
    line = 0.35 if lines < _MANY else 0.28  # inches
    heights = [line * lines + 1.0, *[0.55 * line * lines + 0.8] * math.ceil(len(small) / across)]
    with _styled():
        figure = Figure(figsize=(10.5, sum(heights)))
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        axes = figure.add_subplot(grid[0, :])
        _draw(axes, comparison, rows, main, 1)
        _annotate(axes, rows, main, comparison)
        for at, metric in enumerate(small):
            panel = figure.add_subplot(grid[1 + at // across, at % across])
            _draw(panel, comparison, rows, metric, across)
            panel.tick_params(labelsize=7.5, labelleft=at % across == 0)
            if panel.get_xscale() == "linear":
                panel.locator_params(axis="x", nbins=3 if across == _ACROSS else 4)
        _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    marks = [each for axes in figure.axes for each in zip(*axes.get_legend_handles_labels(), strict=True)]
    order = [*(label for *_, label in _SHAPES.values()), _ONE_RUN, *RANGES.values()]
    known = {label: handle for wanted in order for handle, label in marks if label == wanted}
    spaces: dict[str, Any] = {"handlelength": 1.4, "columnspacing": 1.4}
    legend = figure.legend(known.values(), known, ncols=7, loc="outside upper left", **spaces)
    for label, handle in zip(known, legend.get_lines(), strict=True):
        if label not in order[:3]:
            handle.set_color(_SHAPES[""][1])  # neutral colour, because rows of every colour have this marker


def document(figure: Figure, format: str) -> bytes:
    """Return the bytes of ``figure`` in the format "svg" or "png". The same figure always gives the same bytes."""
    kept = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
    with _styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # An SVG uses the reader's fonts, not matplotlib's.
        figure.savefig(kept, format=format, metadata=metadata)
    return kept.getvalue()


@contextlib.contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _plain(text: str) -> str:
    return printable(text, lines=False).replace("$", r"\$")


def _draw(axes: Axes, comparison: Comparison, rows: Sequence[ComparisonRow], metric: Metric, across: int) -> None:
    drawn: list[float] = []
    for at, (row, shown) in enumerate(zip(rows, shown_cells(comparison, metric), strict=False)):
        if shown is None:
            continue
        cell = shown.cell
        shape, colour, label = _SHAPES["A/A" if row.again else shown.verdict]
        values = [value for value in cell.values if math.isfinite(value)]
        drawn += values
        if len(cell.values) > 1 and math.isfinite(cell.high - cell.low):
            reach = RANGES[len(cell.values) > 5]
            axes.plot([cell.low, cell.high], [at, at], color=colour, linewidth=4, alpha=0.35, label=reach)
        if len(cell.values) > 1 and values:
            hollow: dict[str, Any] = {"markerfacecolor": "none", "markersize": 4}
            axes.plot(values, [at] * len(values), "o", label=_ONE_RUN, color=colour, **hollow)
        if math.isfinite(cell.median):
            axes.plot([cell.median], [at], shape, color=colour, markersize=9 if shape == "*" else 5, label=label)
        else:
            axes.text(0.01, at, shown.text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5)
    more = len(comparison.ranked) - len(rows)
    labels = [_plain(_label(row)) for row in rows] + [f"{more} more in the table"] * (more > 0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=False):
        tick.set_fontstyle("italic" if row.again else "normal")
    if drawn and min(drawn) > 0 and max(drawn) / min(drawn) >= _LOGARITHMIC:
        axes.set_xscale("log")
    axes.set_title(_plain(shortened(metric.head, _TITLES[across])), fontsize=10.0 if across == 1 else 8.5)
    axes.set_xlabel(ALL_TIE if metric.name in comparison.undecided else "", fontsize=7.5)


def _annotate(axes: Axes, rows: Sequence[ComparisonRow], metric: Metric, comparison: Comparison) -> None:
    """Write the number of each row, or its error, to the right of the large panel."""
    better = f" ({metric.better} is better)" if metric.better else ""
    scale = ", logarithmic scale" if axes.get_xscale() == "log" else ""
    tie = f", {ALL_TIE}" if metric.name in comparison.undecided else ""
    axes.set_xlabel(_plain(f"{metric.name}{better}{scale}{tie}"), fontsize=9.0)
    across = axes.get_yaxis_transform()
    for at, (row, shown) in enumerate(zip(rows, shown_cells(comparison, metric), strict=False)):
        if shown is not None:
            weight = "bold" if shown.verdict == "best" else "normal"
            axes.text(1.012, at, shown.one_line, transform=across, va="center", fontweight=weight)
        elif row.error:
            text = _plain(shortened(f"{row.status}: {first_line(row.error)}", 88))
            style: dict[str, Any] = {"va": "center", "fontsize": 8.0, "color": _FAILED, "in_layout": False}
            axes.text(0.008, at, text, transform=across, **style)


def _label(row: ComparisonRow) -> str:
    if row.again:
        return AGAIN
    parts = list(filter(None, (*map(parameter_text, row.parameters.values()), row.versions))) or [row.label]
    return " · ".join(shortened(part, _LONGEST // len(parts)) for part in parts)
