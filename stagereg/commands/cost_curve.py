"""The curve of ``stagereg plan``: what is lost at each interval, and to what, as points, CSV and a picture.

The parts are those of :func:`stagereg.checkpoint.interval.lost_fraction`, which describes the model. Only the
picture needs matplotlib; it has the style of the other pictures.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import stagereg.checkpoint.interval as interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CostModel", "Loss", "csv_text", "duration_text", "loss_figure"]

_SPAN = 30
"""How many times shorter and longer than the best interval the curve goes."""
_POINTS = 241
_UNITS = ((60, "min", 60, "s", 1), (24, "h", 3600, "min", 60), (10, "d", 86400, "h", 3600))
"""Up to how many, of what, in seconds; and the unit of what is left."""


@dataclass(frozen=True)
class Loss:
    """What is lost at one interval, as parts of the time from 0 to 1.

    Attributes:
        interval_s: work from one checkpoint to the next, seconds.
        checkpoints: taken by checkpoints that came to be.
        twice: work, and its checkpoints, that failures undid.
        restarts: between failures and going on.
        total: all of these.
    """

    interval_s: float
    checkpoints: float
    twice: float
    restarts: float
    total: float


@dataclass(frozen=True)
class CostModel:
    """What the model knows of a job; all in seconds, see :mod:`stagereg.checkpoint.interval`."""

    cost_s: float
    write_s: float
    restart_s: float
    mtbf_s: float

    @property
    def best_s(self) -> float:
        """The interval to take."""
        return interval.best(self.cost_s, self.mtbf_s, self.write_s)

    @property
    def least_s(self) -> float:
        """The shortest interval there can be."""
        return interval.least(self.cost_s, self.write_s)

    def loss(self, interval_s: float) -> Loss:
        """What is lost at an interval above 0."""
        total = interval.lost_fraction(interval_s, self.cost_s, self.mtbf_s, self.restart_s, self.write_s)
        held = max(self.cost_s, self.write_s - interval_s)  # the loop waits for a writer that is not done
        checkpoints = (1 - total) * held / interval_s
        restarts = min(-math.expm1(-self.restart_s / self.mtbf_s), total - checkpoints)
        return Loss(interval_s, checkpoints, max(0.0, total - checkpoints - restarts), restarts, total)

    def near(self, more: float) -> tuple[float, float]:
        """The shortest and the longest interval that lose at most ``more`` than the best does, a part of the time."""
        bound = self.loss(self.best_s).total + more
        return self._edge(self.best_s / 1e4, bound), self._edge(self.best_s * 1e4, bound)

    def curve(self) -> list[Loss]:
        """Intervals around the best one, evenly on a logarithmic scale, with it in the middle."""
        half = _POINTS // 2
        return [self.loss(self.best_s * _SPAN ** ((i - half) / half)) for i in range(_POINTS)]

    def _edge(self, outside: float, bound: float) -> float:
        inside = self.best_s
        for _ in range(60):
            middle = math.sqrt(inside * outside)
            inside, outside = (middle, outside) if self.loss(middle).total <= bound else (inside, middle)
        return inside


def csv_text(job: CostModel, step_s: float | None) -> str:
    """The curve as CSV: seconds, steps where a step's time is known, and parts of the time."""
    kept = io.StringIO()
    writer = csv.writer(kept, lineterminator="\n")
    steps = ["interval_steps"] if step_s else []
    writer.writerow(["interval_s", *steps, "lost", "lost_to_checkpoints", "done_twice", "lost_to_restarts"])
    for one in job.curve():
        steps = [f"{one.interval_s / step_s:.6g}"] if step_s else []
        parts = (one.total, one.checkpoints, one.twice, one.restarts)
        writer.writerow([f"{one.interval_s:.6g}", *steps, *(f"{part:.6g}" for part in parts)])
    return kept.getvalue()


def loss_figure(job: CostModel, step_s: float | None, title: str) -> Figure:
    """Draw what is lost over the interval, and to what, with the intervals of the formulas.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from stagereg.sweep.render.plots import COLOURS, plain, styled

    best, curve = job.loss(job.best_s), job.curve()
    top = min(100.0, 100 * max(3.0 * best.total, best.total + 0.02))
    below = 100 * best.total > 0.6 * top or job.least_s > interval.optimum(job.cost_s, job.mtbf_s)
    with styled(**{"axes.grid.axis": "y"}):
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        axes = figure.add_subplot()
        at = [one.interval_s for one in curve]
        parts = (
            ("restarts", [100 * one.restarts for one in curve], COLOURS["plain"]),
            ("taken by checkpoints", [100 * one.checkpoints for one in curve], COLOURS["tie"]),
            ("work done twice", [100 * one.twice for one in curve], COLOURS["again"]),
        )
        names, heights, colours = zip(*(part for part in parts if max(part[1]) > 0), strict=True)
        axes.stackplot(at, *heights, labels=names, colors=colours, alpha=0.55, linewidth=0)
        axes.plot(at, [100 * one.total for one in curve], color=COLOURS["ink"], linewidth=1.6)
        axes.set_xscale("log")
        axes.set_xlim(at[0], at[-1])
        axes.set_ylim(0, top)
        _mark_formulas(axes, job, top)
        axes.plot([best.interval_s], [100 * best.total], "o", color=COLOURS["best"], markersize=8, zorder=5)
        axes.annotate(
            f"{_interval_text(best.interval_s, step_s)}\n{100 * best.total:.2g} % lost",
            (best.interval_s, 100 * best.total),
            xytext=(0, -14 if below else 26),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            color=COLOURS["best"],
            fontweight="bold",
            bbox={"facecolor": COLOURS["surface"], "edgecolor": "none", "alpha": 0.85, "pad": 2},
        )
        _mark_times(axes, at[0], at[-1])
        axes.set_xlabel("work from one checkpoint to the next")
        axes.set_ylabel("time lost, %")
        axes.set_title(plain(title))
        figure.legend(loc="outside lower center", ncols=len(names))
        if step_s:
            _add_steps(axes, step_s)
    return figure


def duration_text(seconds: float) -> str:
    """``seconds`` as people write them, to about three digits."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    for most, unit, size, smaller, small in _UNITS:
        whole, rest = divmod(round(seconds / small), size // small)
        if whole < most:
            return f"{whole:,} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds / 86400:,.0f} d"


def _interval_text(seconds: float, step_s: float | None) -> str:
    steps = f" = {interval.in_steps(seconds, step_s):,} steps" if step_s else ""
    return f"{duration_text(seconds)}{steps}"


def _mark_formulas(axes: Axes, job: CostModel, top: float) -> None:
    from stagereg.sweep.render.plots import COLOURS

    for name, value in (
        ("Young 1974", interval.young(job.cost_s, job.mtbf_s)),
        ("Daly 2006", interval.daly(job.cost_s, job.mtbf_s)),
    ):
        if axes.get_xlim()[0] < value < axes.get_xlim()[1]:
            axes.axvline(value, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
            left = name.startswith("Daly")
            axes.annotate(
                name,
                (value, top),
                xytext=(-4 if left else 4, -12),
                textcoords="offset points",
                ha="right" if left else "left",
                color=COLOURS["muted"],
                fontsize=8,
            )
    if job.least_s > axes.get_xlim()[0]:
        axes.axvspan(axes.get_xlim()[0], job.least_s, color=COLOURS["failed"], alpha=0.12, linewidth=0)
        axes.annotate(
            "a save waits until the\none before is written",
            (axes.get_xlim()[0], top),
            xytext=(6, -12),
            textcoords="offset points",
            va="top",
            color=COLOURS["failed"],
            fontsize=8,
        )


_ROUND_S = (
    *(factor * power for power in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1) for factor in (1, 2, 5)),
    *(1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 2 * 3600, 5 * 3600, 12 * 3600),
    *(days * 86400 for days in (1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000)),
)
"""Seconds that are round for people."""


def _mark_times(axes: Axes, low: float, high: float) -> None:
    ticks = [time for time in _ROUND_S if low <= time <= high]
    axes.set_xticks(ticks, [duration_text(time) for time in ticks])
    axes.set_xticks([], minor=True)


def _add_steps(axes: Axes, step_s: float) -> None:
    def in_steps(seconds: Any) -> Any:
        return seconds / step_s

    def in_seconds(steps: Any) -> Any:
        return steps * step_s

    low, high = (edge / step_s for edge in axes.get_xlim())
    top = axes.secondary_xaxis("top", functions=(in_steps, in_seconds))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [factor * 10**power for power in powers if power >= 0 for factor in (1, 2, 5)]
    ticks = [steps for steps in ticks if low <= steps <= high]
    top.set_xticks(ticks, [f"{steps:,}" for steps in ticks])
    top.set_xticks([], minor=True)
    top.set_xlabel("steps")
