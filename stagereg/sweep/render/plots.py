"""The picture of a comparison: a panel for each metric, with every run of every row in the order of the table.

Best, tie, A/A and others differ in shape and colour; the colours are for any colour vision (after Okabe and Ito,
https://jfly.uni-koeln.de/color/). The same comparison gives the same bytes, whatever the user's matplotlibrc.
Matplotlib is imported when a picture is made; ``ImportError`` without it.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import Metric
from stagereg.sweep.render.tables import first_line, one_line

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
    "A/A": ("s", "#b87900", "A/A: the first combination once more"),
    "": ("o", "#7d8794", "median"),
}
"""Shape, colour and legend of a row's median, by its verdict."""
_FAILED = "#c4480c"
_ACROSS = 4  # small panels in a line, at most
_LONGEST = 42  # letters of a row's label
_LOGARITHMIC = 30.0  # least ratio of the greatest value to the least for a logarithmic scale


def compare_figure(comparison: Comparison) -> Figure | None:
    """Return the picture of ``comparison``, or None where no row has a number to be drawn.

    Where the metric that ranks is nowhere known, the first one that is takes its place.
    """
    rows = comparison.ranked
    small = list(comparison.metrics)
    if not small:
        return None
    from matplotlib.figure import Figure

    names = [metric.name for metric in small]
    main = small.pop(names.index(comparison.ranking.name) if comparison.ranking.name in names else 0)
    across = min(_ACROSS, len(small)) or 1
    heights = [0.35 * len(rows) + 1.0, *[0.2 * len(rows) + 0.8] * math.ceil(len(small) / across)]
    with _styled():
        figure = Figure(figsize=(10.5, sum(heights)))
        grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
        axes = figure.add_subplot(grid[0, :])
        _draw(axes, rows, main)
        _annotate(axes, rows, main, comparison.ranking.name)
        for at, metric in enumerate(small):
            panel = figure.add_subplot(grid[1 + at // across, at % across])
            _draw(panel, rows, metric)
            panel.tick_params(labelsize=7.5, labelleft=at % across == 0)
            if panel.get_xscale() == "linear":
                panel.locator_params(axis="x", nbins=4)
        artists, labels = axes.get_legend_handles_labels()
        each = dict(zip(labels, artists, strict=True))
        figure.legend(each.values(), each, ncols=6, handlelength=1.4, columnspacing=1.4, loc="outside upper left")
    return figure


def document(figure: Figure, format: str) -> bytes:
    """Return ``figure`` as a file, ``"svg"`` or ``"png"``; the same figure gives the same document."""
    kept = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
    with _styled(), warnings.catch_warnings():
        # An SVG is shown in the reader's fonts anyway.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
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
    return text.replace("$", r"\$")


def _draw(axes: Axes, rows: Sequence[ComparisonRow], metric: Metric) -> None:
    drawn: list[float] = []
    for at, row in enumerate(rows):
        cell = row.cells.get(metric.name)
        if cell is None:
            continue
        shape, colour, label = _SHAPES["A/A" if row.again else cell.verdict]
        values = cell.values
        drawn += values
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            axes.plot([low, high], [at, at], color=colour, linewidth=4, alpha=0.35, label="middle half of the runs")
            single: dict[str, Any] = {"color": colour, "markerfacecolor": "none", "markersize": 4}
            axes.plot(values, [at] * len(values), "o", label="one run", **single)
        axes.plot([cell.median], [at], shape, color=colour, markersize=9 if shape == "*" else 5, label=label)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_plain(_label(row)) for row in rows])
    if min(drawn) > 0 and max(drawn) / min(drawn) >= _LOGARITHMIC:
        axes.set_xscale("log")
    axes.set_title(_plain(metric.head))


def _annotate(axes: Axes, rows: Sequence[ComparisonRow], metric: Metric, ranking: str) -> None:
    """Add to the large panel the numbers at the right of each row, and what became of those that have none."""
    better = f" ({metric.better} is better)" if metric.better else ""
    scale = ", logarithmic scale" if axes.get_xscale() == "log" else ""
    axes.set_xlabel(_plain(f"{metric.name}{better}{scale}"))
    across = axes.get_yaxis_transform()
    for at, row in enumerate(rows):
        weight = "bold" if row.verdict(ranking) == "best" else "normal"
        if cell := row.cells.get(metric.name):
            axes.text(1.012, at, one_line(cell), transform=across, va="center", fontweight=weight)
        elif row.error:
            text = _plain(_shortened(f"{row.status}: {first_line(row.error)}", 88))
            style: dict[str, Any] = {"va": "center", "fontsize": 8.0, "color": _FAILED, "in_layout": False}
            axes.text(0.008, at, text, transform=across, **style)


def _label(row: ComparisonRow) -> str:
    """What a row is called: the values alone, for the names are the same in all."""
    parts = list(filter(None, (*row.parameters.values(), row.versions))) or [row.label]
    text = " · ".join(_shortened(part, _LONGEST // len(parts)) for part in parts)
    return f"{text} (A/A)" if row.again else text


def _shortened(text: str, longest: int) -> str:
    flat = " ".join(text.split())
    if len(flat) <= longest:
        return flat
    head = longest * 2 // 3
    return f"{flat[:head]}…{flat[-(longest - head - 1) :]}"
