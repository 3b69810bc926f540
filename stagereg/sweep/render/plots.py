"""The picture of a comparison: every run of every row, so that one sees whether a difference is one.

One large panel for the metric that ranks, and a small one for each other metric, the rows in the order of the table.
Best, tie, A/A and failed differ in shape as well as in colour, and the colours for people with any colour vision
(after Okabe and Ito, https://jfly.uni-koeln.de/color/).

Pictures are drawn with matplotlib's objects, without pyplot and untouched by the user's matplotlibrc, and the same
comparison gives the same bytes: :func:`styled` is the style, :func:`svg_text` and :func:`png_bytes` the documents, for
other pictures too. The colours of :data:`COLOURS` follow light and dark where the SVG stands in a page.

Matplotlib is imported when a picture is made; who has none gets ImportError from each function here.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stagereg.sweep.render.tables import ComparisonTable, TableRow, first_line, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from stagereg.sweep.comparison import Comparison
    from stagereg.sweep.metric import Metric

__all__ = ["COLOURS", "compare_figure", "legend", "plain", "png_bytes", "styled", "svg_text"]

COLOURS = {
    "surface": "#fefefe",
    "ink": "#1b2430",
    "muted": "#5c6673",
    "grid": "#dde2e8",
    "best": "#0072b2",
    "tie": "#3d9bd6",
    "plain": "#7d8794",
    "again": "#b87900",
    "failed": "#c4480c",
    "good": "#00805c",
}
"""Names and colours on a light ground; a page has a dark one by each name."""
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["grid"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.0,
    "grid.color": COLOURS["grid"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["muted"],
    "savefig.facecolor": COLOURS["surface"],
    "svg.fonttype": "none",
    "svg.hashsalt": "stagereg",
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["muted"],
    "xtick.major.size": 0.0,
    "ytick.color": COLOURS["ink"],
    "ytick.major.size": 0.0,
}
_SHAPES = {
    "best": ("*", 130.0, "best", "best"),
    "tie": ("D", 34.0, "tie", "ties with the best"),
    "A/A": ("s", 34.0, "again", "A/A: the first combination once more"),
    "": ("o", 38.0, "plain", "median"),
}
"""Shape, area (points squared), colour and legend of a row's median, by its verdict."""
_DOTS_PER_INCH = 144.0
_WIDTH = 10.5
"""Inches, as are the next: of a row, and of what each panel has above and below its rows."""
_ROW, _SMALL_ROW, _AROUND = 0.36, 0.2, 0.75
_MANY = 14
"""Rows from which on they stand closer."""
_CLOSER = 0.7
_SMALL_PANELS = 4
"""In a line, at most."""
_LONGEST = 42
"""Letters of a row's label."""
_FROM_ZERO = 0.4
"""A scale begins at zero where the least value is below this part of the greatest."""
_LOGARITHMIC = 30.0
"""How many times the least value the greatest must be for a logarithmic scale."""


def compare_figure(comparison: Comparison) -> Figure | None:
    """Return the picture of ``comparison``, or None where no row has a number to be drawn.

    Where the metric that ranks is nowhere known, the first one that is takes its place.
    """
    rows = ComparisonTable.of(comparison).rows
    shown = comparison.metrics
    if not shown:
        return None
    from matplotlib.figure import Figure

    main = next((metric for metric in shown if metric.name == comparison.ranking.name), shown[0])
    small = [metric for metric in shown if metric is not main]
    across = min(_SMALL_PANELS, len(small)) or 1
    lines = math.ceil(len(small) / across)
    closer = _CLOSER if len(rows) >= _MANY else 1.0
    heights = [_ROW * closer * len(rows) + _AROUND, *[_SMALL_ROW * len(rows) + _AROUND] * lines]
    with styled():
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(1 + lines, across, height_ratios=heights)
        axes = figure.add_subplot(grid[0, :])
        _draw(axes, rows, main)
        _label(axes, rows, main)
        for index, metric in enumerate(small):
            line, column = divmod(index, across)
            _draw(figure.add_subplot(grid[1 + line, column]), rows, metric, small=True, labelled=column == 0)
        legend(figure, axes, loc="outside upper left")
    return figure


def svg_text(figure: Figure) -> str:
    """Return ``figure`` as an SVG document whose letters are text; the same figure gives the same document."""
    kept = io.StringIO()
    with styled(), _muted():
        figure.savefig(kept, format="svg", metadata={"Date": None, "Creator": None})
    return kept.getvalue()


def png_bytes(figure: Figure) -> bytes:
    """Return ``figure`` as a PNG file."""
    kept = io.BytesIO()
    with styled(), _muted():
        figure.savefig(kept, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return kept.getvalue()


@contextlib.contextmanager
def styled(**settings: Any) -> Iterator[None]:
    """Matplotlib's own settings, then ours, then ``settings``, until left; then the user's are there again."""
    import matplotlib

    wanted: dict[Any, Any] = {**_STYLE, **settings}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(wanted)
        yield


def plain(text: str) -> str:
    """Return ``text`` as matplotlib has to be given it so that no dollar sign turns it into mathematics."""
    return text.replace("$", r"\$")


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Without a warning for each letter that the font does not have: an SVG is shown in the reader's fonts anyway."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        yield


def _draw(axes: Axes, rows: Sequence[TableRow], metric: Metric, small: bool = False, labelled: bool = True) -> None:
    """Draw the points, the middle half and the median of every row, the first row on top."""
    factor = 0.55 if small else 1.0
    drawn: list[float] = []
    for index, one in enumerate(rows):
        cell = one.row.cells.get(metric.name)
        if cell is None:
            continue
        verdict = "A/A" if one.row.again else cell.verdict
        shape, area, name, label = _SHAPES[verdict]
        colour = COLOURS[name]
        values = cell.values
        drawn += [*values, cell.median]
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            half: dict[str, Any] = {
                "color": colour,
                "linewidth": 5 * factor,
                "alpha": 0.35,
                "label": "middle half of the runs",
            }
            axes.plot([low, high], [index, index], zorder=2, **half)
            single: dict[str, Any] = {"s": 16 * factor, "facecolors": "none", "edgecolors": colour, "label": "one run"}
            axes.scatter(values, [index] * len(values), zorder=3, **single)
        if verdict == "best" and len(rows) > 1:
            axes.axvline(cell.median, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7, zorder=1)
        face, edge = (colour, COLOURS["surface"]) if verdict != "A/A" else (COLOURS["surface"], colour)
        median: dict[str, Any] = {"s": area * factor, "marker": shape, "facecolors": face, "edgecolors": edge}
        axes.scatter([cell.median], [index], zorder=4, label=label, **median)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    labels = _labels(rows) if labelled else [""] * len(rows)
    axes.set_yticks(range(len(rows)), [plain(label) for label in labels], fontsize=7.5 if small else 9.0)
    _scale(axes, drawn, 4 if small else 8)
    axes.tick_params(axis="x", labelsize=7.5 if small else 8.5)
    axes.set_title(plain(metric.head), fontsize=8.5 if small else 10.0)


def _scale(axes: Axes, drawn: Sequence[float], most: int) -> None:
    """Give the axis of values its scale and at most ``most`` ticks, with enough digits to distinguish them."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter, StrMethodFormatter

    low, high = min(drawn), max(drawn)
    if low > 0 and high / low >= _LOGARITHMIC:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=most))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        return
    whole = all(float(value).is_integer() for value in drawn)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    begin = 0.0 if 0 <= low <= _FROM_ZERO * high else low
    axes.set_xlim(begin - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=whole))
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))


def _label(axes: Axes, rows: Sequence[TableRow], metric: Metric) -> None:
    """Add to the large panel the numbers at the right of each row, and what became of those that have none."""
    better = f" ({metric.better} is better)" if metric.better else ""
    scale = ", logarithmic scale" if axes.get_xscale() == "log" else ""
    axes.set_xlabel(plain(f"{metric.name}{better}{scale}"))
    across = axes.get_yaxis_transform()
    for index, (one, label) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
        weight = "bold" if one.verdict == "best" else "normal"
        label.set_fontweight(weight)
        if cell := one.row.cells.get(metric.name):
            axes.text(1.012, index, one_line(cell), transform=across, va="center", fontsize=8.5, fontweight=weight)
        elif one.row.error:
            text = plain(_shortened(f"{one.row.status}: {first_line(one.row.error)}", 88))
            style: dict[str, Any] = {"va": "center", "fontsize": 8.0, "color": COLOURS["failed"], "in_layout": False}
            axes.text(0.008, index, text, transform=across, **style)


def legend(figure: Figure, axes: Axes, **where: Any) -> None:
    """Add a legend of what has a label in ``axes``, each label once."""
    artists, labels = axes.get_legend_handles_labels()
    each = dict(zip(labels, artists, strict=True))
    figure.legend(each.values(), each, ncols=6, handlelength=1.4, columnspacing=1.4, fontsize=8.5, **where)


def _labels(rows: Sequence[TableRow]) -> list[str]:
    """What the rows are called, each with its own label: the values alone, for the names are the same in all."""
    texts = []
    for one in rows:
        text = _shortened(" · ".join(filter(None, one.values)) or one.row.label, _LONGEST)
        texts.append(f"{text} (A/A)" if one.row.again else text)
    return [text if texts.count(text) == 1 else f"{text} #{index + 1}" for index, text in enumerate(texts)]


def _shortened(text: str, longest: int) -> str:
    flat = " ".join(text.split())
    if len(flat) <= longest:
        return flat
    head = longest * 2 // 3
    return f"{flat[:head]}…{flat[-(longest - head - 1) :]}"
