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
import itertools
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import stagereg.sweep.render.tables as tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from stagereg.sweep.comparison import Cell, Comparison, ComparisonRow
    from stagereg.sweep.metric import Metric

__all__ = ["COLOURS", "compare_figure", "plain", "png_bytes", "styled", "svg_text"]

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
    "axes.labelsize": 9.0,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "figure.facecolor": COLOURS["surface"],
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.0,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["muted"],
    "lines.solid_capstyle": "butt",
    "savefig.facecolor": COLOURS["surface"],
    "svg.fonttype": "none",
    "svg.hashsalt": "stagereg",
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["muted"],
    "xtick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.color": COLOURS["ink"],
    "ytick.major.size": 0.0,
}
_SHAPES = {"best": ("*", 130.0), "tie": ("D", 34.0), "A/A": ("s", 34.0), "": ("o", 38.0)}
"""Shape and area (points squared) of a row's median."""
_KINDS = {"best": "best", "tie": "tie", "A/A": "again", "": "plain"}
"""The colour of a row's median."""
_CROSS = "\N{MULTIPLICATION SIGN}"
_DOTS_PER_INCH = 144.0
_WIDTH = 10.5
"""Inches, as are the next."""
_EDGE = 0.25
_TOP = 0.62
_BOTTOM = 0.6
_ROW = 0.36
_ROW_OF_MANY = 0.25
_SMALL_ROW = 0.2
_SMALL_GAP = 0.32
_SMALL_TOP = 0.42
_SMALL_BOTTOM = 0.32
_CHARACTER = 0.075
"""What a letter of a label takes."""
_MARKER = 0.36
"""What a marker of the legend and the space around it take."""
_MANY = 14
"""Rows from which on they stand closer."""
_SMALL_PANELS = 4
"""In a line, at most."""
_LONGEST = 42
"""Letters of a row's label."""
_LOGARITHMIC = 30.0
"""How many times the least value the greatest must be for a logarithmic scale."""
_FROM_ZERO = 0.4
"""A scale begins at zero where the least value is below this part of the greatest."""


def compare_figure(comparison: Comparison) -> Figure | None:
    """Return the picture of ``comparison``, or None where no row has a number to be drawn.

    Where the metric that ranks is nowhere known, the first one that is takes its place.
    """
    rows = tables.ordered(comparison)
    shown = [metric for metric in comparison.metrics if any(tables.known(row, metric) for row in rows)]
    if not shown:
        return None
    from matplotlib.figure import Figure

    main = next((metric for metric in shown if metric.name == comparison.ranking.name), shown[0])
    small = [metric for metric in shown if metric is not main]
    labels = _labels(rows)
    kinds = [tables.verdict(row, comparison) for row in rows]
    tall = len(rows) * (_ROW if len(rows) < _MANY else _ROW_OF_MANY)
    across = min(_SMALL_PANELS, max(2, len(small)))
    lines = math.ceil(len(small) / across)
    tall_small = len(rows) * _SMALL_ROW
    height = _TOP + tall + _BOTTOM + lines * (_SMALL_TOP + tall_small + _SMALL_BOTTOM)
    left = _EDGE + max(map(len, labels)) * _CHARACTER + 0.1
    with styled():
        figure = Figure(figsize=(_WIDTH, height))

        def panel(x: float, top: float, wide: float, high: float) -> Axes:
            return figure.add_axes((x / _WIDTH, 1 - (top + high) / height, wide / _WIDTH, high / height))

        texts = [_one_line(tables.known(row, main)) for row in rows]
        width = max(map(len, texts)) * _CHARACTER + 0.2
        axes = panel(left, _TOP, _WIDTH - left - width - _EDGE, tall)
        _draw(axes, rows, main, labels, kinds)
        _texts(axes, rows, texts, kinds)
        _legend(figure, axes, kinds, rows)
        wide = (_WIDTH - left - _EDGE + _SMALL_GAP) / across - _SMALL_GAP
        for index, metric in enumerate(small):
            line, column = divmod(index, across)
            top = _TOP + tall + _BOTTOM + line * (_SMALL_TOP + tall_small + _SMALL_BOTTOM) + _SMALL_TOP
            axes = panel(left + column * (wide + _SMALL_GAP), top, wide, tall_small)
            _draw(axes, rows, metric, labels if column == 0 else [""] * len(rows), kinds, small=True)
    return figure


def svg_text(figure: Figure) -> str:
    """Return ``figure`` as an SVG document whose letters are text; the same figure gives the same document."""
    kept = io.StringIO()
    with styled(), _muted():
        figure.savefig(kept, format="svg", metadata={"Date": None, "Creator": None})
    return kept.getvalue()


def png_bytes(figure: Figure, dots_per_inch: float = _DOTS_PER_INCH) -> bytes:
    """Return ``figure`` as a PNG file."""
    kept = io.BytesIO()
    with styled(), _muted():
        figure.savefig(kept, format="png", dpi=dots_per_inch, metadata={"Software": None})
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


def _draw(
    axes: Axes,
    rows: Sequence[ComparisonRow],
    metric: Metric,
    labels: Sequence[str],
    kinds: Sequence[str],
    small: bool = False,
) -> None:
    """Draw the points, the middle half and the median of every row, the first row on top."""
    factor = 0.55 if small else 1.0
    best = next((cell for row in rows if (cell := tables.known(row, metric)) and cell.verdict == "best"), None)
    if best is not None and len(rows) > 1:
        last = max(index for index, row in enumerate(rows) if tables.known(row, metric))
        at, ends = [best.median] * 2, [-0.5, last + 0.5]
        axes.plot(at, ends, color=COLOURS["best"], linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7, zorder=1)
    drawn: list[float] = []
    for index, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        cell = tables.known(row, metric)
        if cell is None:
            continue
        kind = ("A/A" if row.again else cell.verdict) if small else kind if kind in _SHAPES else cell.verdict
        shape, area = _SHAPES[kind]
        colour = COLOURS[_KINDS[kind]]
        values = [value for value in cell.values if math.isfinite(value)]
        drawn += [*values, cell.median]
        if len(values) > 1:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
            axes.plot([low, high], [index, index], color=colour, linewidth=5 * factor, alpha=0.35, zorder=2)
            axes.scatter(
                values,
                [index] * len(values),
                s=16 * factor,
                facecolors="none",
                edgecolors=colour,
                linewidths=0.9,
                zorder=3,
            )
        hollow = kind == "A/A"
        axes.scatter(
            [cell.median],
            [index],
            s=area * factor,
            marker=shape,
            facecolors=COLOURS["surface"] if hollow else colour,
            edgecolors=colour if hollow else COLOURS["surface"],
            linewidths=1.5 if hollow else 0.7,
            zorder=4,
        )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [plain(label) for label in labels], fontsize=7.5 if small else 9.0)
    for label, kind in zip(axes.get_yticklabels(), kinds, strict=True):
        if kind == "best":
            label.set_fontweight("bold")
        elif kind in ("failed", "unfinished"):
            label.set_color(COLOURS["muted"])
    _scale(axes, drawn, 4 if small else 8)
    axes.tick_params(axis="x", labelsize=7.5 if small else 8.5)
    better = {"lower": "lower is better", "higher": "higher is better"}.get(metric.better, "")
    if small:
        axes.set_title(plain(metric.head), fontsize=8.5)
    else:
        axes.set_title(plain(metric.head), pad=26)
        scale = ", logarithmic scale" if axes.get_xscale() == "log" else ""
        axes.set_xlabel(plain(f"{metric.name}{f' ({better})' if better else ''}{scale}"))


def _scale(axes: Axes, drawn: Sequence[float], most: int) -> None:
    """Give the axis of values its range and at most ``most`` ticks, with enough digits to distinguish them."""
    low, high = min(drawn), max(drawn)
    if low > 0 and high / low >= _LOGARITHMIC:
        margin = (high / low) ** 0.06
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        ticks = _decades(low / margin, high * margin, most)
        axes.set_xticks(ticks, [tables.number(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        return
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    from_zero = 0 <= low <= _FROM_ZERO * high
    begin, end = (-0.3 * margin if from_zero else low - margin), high + margin
    ticks = _round_steps(begin, end, most, whole=all(float(value).is_integer() for value in drawn))
    axes.set_xlim(begin, end)
    axes.set_xticks(ticks, _distinct_digits(ticks))


def _decades(low: float, high: float, most: int) -> list[float]:
    """Ticks of a logarithmic scale: 1, 2, 5 of each decade if that is not too many, or fewer of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), *(((1,), every) for every in range(1, len(decades)))):
        ticks = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    return ticks


def _round_steps(begin: float, end: float, most: int, whole: bool) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(most - 1, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(begin, end)
    return [float(tick) for tick in found if begin <= tick <= end]


def _distinct_digits(ticks: Sequence[float]) -> list[str]:
    """The numbers with as many digits behind the point as they differ in."""
    step = min((after - before for before, after in itertools.pairwise(ticks)), default=0.0)
    if not step or max(map(abs, ticks)) >= 1e9:
        return [tables.number(tick) for tick in ticks]
    digits = next((n for n in range(12) if all(abs(round(tick, n) - tick) < step / 100 for tick in ticks)), 12)
    return [f"{tick:,.{digits}f}" if tick else "0" for tick in ticks]


def _texts(axes: Axes, rows: Sequence[ComparisonRow], texts: Sequence[str], kinds: Sequence[str]) -> None:
    """The numbers at the right of each row, and in place of points what became of those that have none."""
    for index, (row, text, kind) in enumerate(zip(rows, texts, kinds, strict=True)):
        if text:
            weight = "bold" if kind == "best" else "normal"
            across = axes.get_yaxis_transform()
            axes.text(1.012, index, text, transform=across, va="center_baseline", fontsize=8.5, fontweight=weight)
        elif kind in ("failed", "unfinished"):
            text = f"{_CROSS} {kind}" + (f": {tables.first_line(row.error)}" if row.error else "")
            axes.text(
                0.008,
                index,
                plain(_shortened(text, 88)),
                transform=axes.get_yaxis_transform(),
                va="center_baseline",
                fontsize=8.0,
                color=COLOURS["failed"],
            )


def _legend(figure: Figure, axes: Axes, kinds: Sequence[str], rows: Sequence[ComparisonRow]) -> None:
    from matplotlib.lines import Line2D

    labels = {"best": "best", "tie": "ties with the best", "A/A": "A/A: the first combination once more", "": "median"}
    handles = []
    for kind, label in labels.items():
        if kind not in kinds:
            continue
        shape, area = _SHAPES[kind]
        colour = COLOURS[_KINDS[kind]]
        face = COLOURS["surface"] if kind == "A/A" else colour
        handles.append(
            Line2D([], [], marker=shape, linestyle="", color=face, mec=colour, ms=math.sqrt(area) * 0.9, label=label)
        )
    if any(len(cell.values) > 1 for row in rows for cell in row.cells.values()):
        handles.append(
            Line2D([], [], marker="o", linestyle="", color="none", mec=COLOURS["plain"], ms=4, label="one run")
        )
        handles.append(Line2D([], [], color=COLOURS["plain"], alpha=0.35, linewidth=5, label="middle half of the runs"))
    index = axes.get_position()
    needed = sum(_MARKER + len(str(handle.get_label())) * _CHARACTER * 0.9 for handle in handles)
    # As far left as the title, or further where the picture would end before the text does.
    left = max(min(index.x0 - 0.012, 1 - (needed + _EDGE) / _WIDTH), 0.0)
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left, index.y1),
        ncols=len(handles),
        fontsize=8.0,
        borderaxespad=0.2,
        handletextpad=0.4,
        columnspacing=1.4,
    )


def _one_line(cell: Cell | None) -> str:
    return f"{tables.median_text(cell)} {tables.spread_text(cell)}".rstrip() if cell else ""


def _labels(rows: Sequence[ComparisonRow]) -> list[str]:
    """What the rows are called, each with its own label: the values alone, for the names are the same in all."""
    texts = []
    for row in rows:
        text = _shortened(" · ".join(row.parameters.values()) or row.label, _LONGEST)
        ends = [*([row.versions] if row.versions and row.parameters else []), *(["A/A"] if row.again else [])]
        texts.append(f"{text} ({', '.join(ends)})" if ends else text)
    return [text if texts.count(text) == 1 else f"{text} #{index + 1}" for index, text in enumerate(texts)]


def _shortened(text: str, longest: int) -> str:
    flat = " ".join(text.split())
    if len(flat) <= longest:
        return flat
    head = longest * 2 // 3
    return f"{flat[:head]}…{flat[-(longest - head - 1) :]}"
