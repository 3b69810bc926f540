"""A run as a picture: what every rank did when, so that one sees what a checkpoint costs and what overlaps with it.

Each rank is a block of three lanes over one axis of time. On the first lies training: its steps in alternating shades,
and in a strong colour the stalls, in which training stood still for a checkpoint. Below lie the staging and the writing
of the same checkpoints: what of these lies below a stall was waited for, what lies below steps was not. The top lane
has the checkpoints, from the call that saves one to its being complete on disk.

Times are those that the ranks recorded, so several machines are as far apart as the machines' clocks. Only reads a
run; the figure becomes a file by :mod:`stagereg.sweep.render.plots`, whose style it has. Needs matplotlib.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import isinf
from statistics import median
from typing import TYPE_CHECKING, Any

from stagereg.errors import ConfigError
from stagereg.sweep.checkpoints import Saved, saved
from stagereg.sweep.metric import counted, quantity
from stagereg.sweep.render.plots import COLOURS, legend, plain, styled
from stagereg.sweep.run import RankRecord, Run, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_window", "timeline_figure", "usual_window"]

Window = tuple[float, float]
"""A stretch of time, seconds since the start of the run."""

_STALL, _STAGE, _WRITE = COLOURS["failed"], COLOURS["best"], COLOURS["good"]
_GREY, _FAINT, _INK = COLOURS["plain"], COLOURS["muted"], COLOURS["ink"]
_TRAINING = (0.16, 0.74)
"""Where a lane begins in the block of a rank, and how high it is; the block is two units high, as are the next."""
_STAGING, _WRITING = (0.98, 0.3), (1.36, 0.3)
_MOST_STEPS = 120
"""Steps that a picture can show one by one; a longer run is shown by a window."""
_MOST_CHECKPOINTS = 12
_BEFORE = 3
"""Steps before the first checkpoint in the window of a long run."""
_MERGED_FROM = 600
"""Steps of a rank in one picture from which on they are drawn as stretches, not one by one."""
_TOUCHING_S = 1e-6
"""Seconds between two bars that are rounding alone: times since the epoch have no more digits."""
_MOST_RANKS = 12
_WIDTH = 12.0
"""Inches."""
_LABEL = 0.055
"""The space that a label needs, as a part of the axis."""
_MARGIN = 0.01
"""What is left free before the first thing of a run and after the last one, as a part of the axis."""


def timeline_figure(run: Run, window: Window | None = None) -> Figure:
    """Draw the timeline of ``run``.

    Args:
        run: its records; ranks that recorded no step are drawn as far as they are known.
        window: the stretch to show, seconds since the start of the run, where infinity is its end. By default
            :func:`usual_window`.

    Raises:
        ConfigError: there is nothing of the run in that window, or nothing at all.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    start, end = usual_window(run) if window is None else check_window(run, window)
    checkpoints = saved(run)
    ranks = _chosen(run)
    last = max((record.steps[-1][1] for record in run.ranks if record.steps), default=run.began)
    with styled():
        height = 2.25 + 0.95 * len(ranks)
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.add_axes((0.085, 0.95 / height, 0.9, 1 - 1.6 / height))
        axes.set_xlim(start, end)
        axes.set_ylim(1 + 2 * len(ranks), -0.1)
        axes.set_xlabel("seconds since the start of the run", fontsize=9, color=_FAINT)
        axes.tick_params(axis="both", length=0, labelsize=9)
        axes.spines[:].set_visible(False)
        axes.set_yticks([])
        _draw_checkpoints(axes, [one for one in checkpoints if one.end >= start and one.start <= end])
        for index, record in enumerate(ranks):
            _draw_rank(axes, 1 + 2 * index, record, run.began, last)
        title = _title(run, checkpoints, (start, end))
        figure.text(0.012, 1 - 0.12 / height, plain(title), fontsize=12, weight="bold", va="top", color=_INK)
        subtitle = "; ".join(_subtitle(run, checkpoints, usual=window is None and (start, end) != _whole(run)))
        figure.text(0.012, 1 - 0.38 / height, plain(subtitle), fontsize=9, va="top", color=_FAINT)
        legend(figure, axes, loc="lower left", bbox_to_anchor=(0.08, 0.0))
    return figure


# -- the window


def check_window(run: Run, window: Window) -> Window:
    """Return the window, with the end of the run in the place of infinity.

    Raises:
        ConfigError: there is nothing of ``run`` in it, or nothing to draw at all.
    """
    whole = _whole(run)
    start, end = window[0], min(window[1], whole[1]) if isinf(window[1]) else window[1]
    if not start < end or start > whole[1] or end < 0:
        raise ConfigError(
            f"There is nothing to draw from {start:g} s to {end:g} s: the run has steps and checkpoints from "
            f"{whole[0]:.1f} s to {whole[1]:.1f} s after its start. A window is START:END in seconds, START first."
        )
    return start, end


def usual_window(run: Run) -> Window:
    """Return what is shown of a run by default, seconds since its start.

    That is all of it from its first step on, or, of a run that is too long to see its steps, a stretch around the first
    checkpoints.

    Raises:
        ConfigError: there is nothing of the run to draw.
    """
    whole = _whole(run)
    checkpoints = saved(run)
    ends = sorted(t - run.began for _, t in max((record.steps for record in run.ranks), key=len))
    if len(ends) <= _MOST_STEPS and len(checkpoints) <= _MOST_CHECKPOINTS:
        return whole
    if not checkpoints:
        return whole[0], ends[_MOST_STEPS - 1]
    if not ends:
        return whole[0], checkpoints[_MOST_CHECKPOINTS].end
    first = max(bisect_right(ends, checkpoints[0].start) - 1 - _BEFORE, 0)
    # Ranks need not be at the same step at the same time.
    start = min(max(ends[first], whole[0]), checkpoints[0].start)
    return start, max(checkpoints[0].end, ends[min(first + _MOST_STEPS, len(ends) - 1)])


def _whole(run: Run) -> Window:
    """From the first step to the last thing that is known, with a margin."""
    starts: list[float] = []
    ends: list[float] = []
    for record in run.ranks:
        steps = record.step_spans()
        spans = [*steps[1:2], *record.stalls, *record.stages, *record.writes]
        starts += [span.start - run.began for span in spans or steps]
        ends += [span.end - run.began for span in (*spans, *steps[-1:])]
    if not ends:
        raise ConfigError(
            f"{run.directory} has no steps and no checkpoints to draw: it ended before its first step, "
            "or it trained without a stagereg.Checkpointer and logged nothing by stagereg.log."
        )
    margin = _MARGIN * (max(ends) - min(starts)) or 1e-3
    return max(min(starts) - margin, 0.0), max(ends) + margin


# -- the picture: the top lane is at 0, rank ``index`` has its three lanes from 1 + 2 * index on, and y points down


def _chosen(run: Run) -> list[RankRecord]:
    """The ranks that are drawn: all of them, or rank 0 and those that stood still for longest."""
    if len(run.ranks) <= _MOST_RANKS:
        return list(run.ranks)
    first, *others = run.ranks
    by_stall = sorted(others, key=lambda record: -sum(span.seconds for span in record.stalls))
    return sorted([first, *by_stall[: _MOST_RANKS - 1]], key=lambda record: record.rank)


def _draw_checkpoints(axes: Axes, checkpoints: Sequence[Saved]) -> None:
    _name(axes, 0.5, "checkpoint\nof step", _FAINT, 8)
    left, right = axes.get_xlim()
    below = axes.get_ylim()[0]
    labelled = -float("inf")
    for one in checkpoints:
        whole = one.state == "complete"
        colour = _GREY if whole else _STALL
        axes.hlines(0.62, one.start, one.end, color=colour, linewidth=2.2, label="checkpoint, until complete")
        axes.vlines(one.start, 0.45, below, color=colour, linewidth=0.7, linestyle=(0, (2, 2)), zorder=1.5)
        if left <= one.start <= right and one.start - labelled >= _LABEL * (right - left):
            labelled = one.start
            side = "right" if not whole and one.start > right - 2 * _LABEL * (right - left) else "left"
            text = str(one.step) if whole else f"{one.step} {one.state}"
            axes.text(one.start, 0.38, text, fontsize=8.5, color=_INK if whole else _STALL, va="bottom", ha=side)


def _draw_rank(axes: Axes, top: float, record: RankRecord, began: float, last: float) -> None:
    def draw(spans: Iterable[Span], lane: tuple[float, float], colour: str, label: str, **looks: Any) -> None:
        bars = [(span.start - began, span.seconds) for span in spans]
        shown = [bar for bar in bars if bar[0] + bar[1] >= left and bar[0] <= right]
        if shown:
            axes.broken_barh(shown, (top + lane[0], lane[1]), facecolors=colour, label=label, **looks)

    left, right = axes.get_xlim()
    opening, steps = record.step_spans()[:1], record.step_spans()[1:]
    with_data = max(record.steps_with_data - 1, 0)
    full, empty = steps[:with_data], steps[with_data:]
    joined = record.join or {}
    if joined.get("shadowed") and not empty and record.steps and last > record.steps[-1][1]:
        # It had left its loop, and answered the collectives of the others.
        empty = [Span(0, record.steps[-1][1], last - record.steps[-1][1])]
    shades = [full[::2], full[1::2]]
    if sum(span.end - began >= left and span.start - began <= right for span in steps) > _MERGED_FROM:
        shades, empty = [list(_merged(full))], list(_merged(empty))
    dashed = {"edgecolor": _GREY, "linewidth": 0.8, "linestyle": (0, (3, 2)), "zorder": 2}
    if opening and opening[0].end - began - left > 2 * _MARGIN * (right - left):
        draw(opening, _TRAINING, "none", "start, up to the first step", **dashed)
    for spans, alpha in zip(shades, (0.55, 0.3), strict=False):
        draw(spans, _TRAINING, _GREY, "steps of training", alpha=alpha, linewidth=0, zorder=2)
    hatched = {"hatch": "////", "edgecolor": _GREY, "linewidth": 0.3, "zorder": 2}
    draw(empty, _TRAINING, "none", "steps without data", **hatched)
    draw(record.stages, _STAGING, _STAGE, "staging: copy to memory", edgecolor=_STAGE, linewidth=0.5, zorder=3)
    draw(record.writes, _WRITING, _WRITE, "writing: copy to disk", edgecolor=_WRITE, linewidth=0.5, zorder=3)
    draw(record.stalls, _TRAINING, _STALL, "stall: training stands still", edgecolor=_STALL, linewidth=0.9, zorder=4)
    labelled = -float("inf")
    for span in record.stalls:
        at = span.start + span.seconds / 2 - began
        if left <= at <= right and at - labelled >= _LABEL * (right - left):
            labelled = at
            ground = {"facecolor": COLOURS["surface"], "edgecolor": "none", "pad": 0.6}
            style: dict[str, Any] = {"fontsize": 7.5, "color": _STALL, "ha": "center", "va": "bottom", "bbox": ground}
            axes.text(at, top + 0.12, _duration(span.seconds), **style)
    _name(axes, top + 0.53, f"rank {record.rank}", _INK, 10)
    _name(axes, top + 1.13, "staging", _STAGE, 8)
    _name(axes, top + 1.51, "writing", _WRITE, 8)


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans that touch each other as one."""
    whole: Span | None = None
    for span in spans:
        if whole is not None and span.start <= whole.end + _TOUCHING_S:
            whole = Span(whole.step, whole.start, span.end - whole.start)
            continue
        if whole is not None:
            yield whole
        whole = span
    if whole is not None:
        yield whole


def _name(axes: Axes, y: float, name: str, colour: str, size: float) -> None:
    """Name a lane at its left."""
    left = axes.get_yaxis_transform()
    axes.text(-0.008, y, name, transform=left, ha="right", va="center", fontsize=size, color=colour, linespacing=0.95)


def _duration(seconds: float) -> str:
    return quantity(seconds, "s") if seconds >= 1 else quantity(seconds * 1e3, "ms")


def _title(run: Run, checkpoints: Sequence[Saved], window: Window) -> str:
    steps = max(len(record.steps) for record in run.ranks)
    name = "/".join(run.directory.resolve().parts[-2:])
    ranks = counted(len(run.ranks), "rank")
    title = f"{name}: {counted(steps, 'step')}, {counted(len(checkpoints), 'checkpoint')}, {ranks}"
    whole = _whole(run)
    if window[0] <= whole[0] and window[1] >= whole[1]:
        return title
    digits = 1 if window[1] - window[0] >= 1 else 3
    return f"{title}, {window[0]:.{digits}f} s to {window[1]:.{digits}f} s of {whole[1]:.1f} s"


def _subtitle(run: Run, checkpoints: Sequence[Saved], usual: bool) -> Iterator[str]:
    """The text below the title; ``usual`` where a part of the run was chosen to be shown."""
    if usual:
        yield "a stretch around the first checkpoints" if checkpoints else "its first steps"
    if stalls := [one.stall_s for one in checkpoints if one.stall_s is not None]:
        yield f"a checkpoint holds training for {_duration(median(stalls))} (median of the slowest rank)"
    if len(run.ranks) > _MOST_RANKS:
        yield f"{_MOST_RANKS} of {len(run.ranks)} ranks: the first, and those that stood still for longest"
    if not run.finished:
        yield "the run was ended half-way or still goes on"
    if len({record.start.get("host") for record in run.ranks}) > 1:
        yield "clocks of several machines, which may differ"
