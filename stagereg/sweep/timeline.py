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
from collections.abc import Iterator, Sequence
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from stagereg.errors import ConfigError
from stagereg.sweep.figures import Saved, saved
from stagereg.sweep.metric import counted, metric
from stagereg.sweep.render.plots import COLOURS, legend, plain, styled
from stagereg.sweep.run import RankRecord, Run, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Window = tuple[float, float]
"""A stretch of time, seconds since the start of the run."""

_STALL, _STAGE, _WRITE, _GREY = COLOURS["failed"], COLOURS["best"], COLOURS["good"], COLOURS["plain"]
_TRAINING, _STAGING, _WRITING = (0.16, 0.74), (0.98, 0.3), (1.36, 0.3)
"""Where a lane begins in the block of a rank, and how high it is; the block is two units high."""
_MOST_STEPS = 120
"""Steps that a picture can show one by one; a longer run is shown by a window."""
_BEFORE = 3
"""Steps before the first checkpoint in the window of a long run."""
_MOST_RANKS = 12
_LABEL = 0.055
"""The space that a label needs, as a part of the axis."""
_MARGIN = 0.01
"""What is left free before the first thing of a run and after the last one, as a part of the axis."""


def timeline_figure(run: Run, window: Window | None = None) -> Figure:
    """Draw a stretch of ``run``; ranks that recorded no step are drawn as far as they are known.

    Args:
        run: its records.
        window: seconds since the start of the run, of which the end may be infinity; by default :func:`usual_window`.

    Raises:
        ConfigError: there is nothing of the run to draw, or nothing in that window.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    whole = _whole(run)
    start, end = window or usual_window(run)
    end = min(end, whole[1])
    if start >= end:
        raise ConfigError(f"There is nothing to draw from {start:g} s on: the run ends after {whole[1]:.1f} s.")
    checkpoints = saved(run)
    # All ranks, or rank 0 and those that stood still for longest.
    longest = sorted(run.ranks[1:], key=lambda record: -sum(span.seconds for span in record.stalls))
    ranks = sorted([run.ranks[0], *longest[: _MOST_RANKS - 1]], key=lambda record: record.rank)
    with styled():
        figure = Figure(figsize=(12, 2.0 + 0.95 * len(ranks)))
        axes = figure.add_subplot()
        axes.grid(False)
        axes.set_xlim(start, end)
        axes.set_ylim(1 + 2 * len(ranks), -0.1)
        axes.set_xlabel("seconds since the start of the run")
        lanes = {0.5: "checkpoint of step"}
        _draw_checkpoints(axes, checkpoints)
        for at, record in enumerate(ranks):
            top = 1 + 2 * at
            lanes |= {top + 0.53: f"rank {record.rank}", top + 1.13: "staging", top + 1.51: "writing"}
            _draw_rank(axes, top, record, run.began)
        axes.set_yticks(list(lanes), list(lanes.values()))
        figure.suptitle(plain(_title(run, checkpoints)), x=0.01, ha="left", fontweight="bold")
        subtitle = "; ".join(_subtitle(run, checkpoints, window is None and (start, end) != whole))
        axes.set_title(plain(subtitle), fontsize=9, fontweight="normal", loc="left")
        legend(figure, axes, loc="outside lower left")
    return figure


# -- the window


def usual_window(run: Run) -> Window:
    """Return what is shown of a run, seconds since its start.

    That is all of it from its first step on, or, of a run that is too long to see its steps, a stretch around the first
    checkpoints.

    Raises:
        ConfigError: there is nothing of the run to draw.
    """
    whole = _whole(run)
    ends = sorted(t - run.began for _, t in max((record.steps for record in run.ranks), key=len))
    if len(ends) <= _MOST_STEPS:
        return whole
    first = next(iter(saved(run)), None)
    begin = max(bisect_right(ends, first.start) - 1 - _BEFORE, 0) if first else 0
    start, end = max(ends[begin], whole[0]), ends[min(begin + _MOST_STEPS, len(ends) - 1)]
    # Ranks need not be at the same step at the same time.
    return (min(start, first.start), max(end, first.end)) if first else (whole[0], end)


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


# -- the picture: the top lane is at 0, each rank has its three lanes from ``top`` on, and y points down


def _draw_checkpoints(axes: Axes, checkpoints: Sequence[Saved]) -> None:
    left, right = axes.get_xlim()
    labelled = -inf
    for one in checkpoints:
        colour = _GREY if one.state == "complete" else _STALL
        axes.hlines(0.62, one.start, one.end, color=colour, linewidth=2.2, label="checkpoint, until complete")
        axes.axvline(one.start, color=colour, linewidth=0.7, linestyle=":", zorder=1.5)
        if left <= one.start <= right and one.start - labelled >= _LABEL * (right - left):
            labelled = one.start
            axes.text(one.start, 0.38, str(one.step) if one.state == "complete" else f"{one.step} {one.state}")


def _draw_rank(axes: Axes, top: float, record: RankRecord, began: float) -> None:
    left, right = axes.get_xlim()

    def draw(spans: Sequence[Span], lane: tuple[float, float], colour: str, label: str, **looks: Any) -> None:
        bars = [(span.start - began, span.seconds) for span in spans]
        shown = [bar for bar in bars if bar[0] + bar[1] >= left and bar[0] <= right]
        if shown:
            axes.broken_barh(shown, (top + lane[0], lane[1]), facecolors=colour, label=label, **looks)

    steps = record.step_spans()[1:]
    draw(steps[::2], _TRAINING, _GREY, "steps of training", alpha=0.55, linewidth=0)
    draw(steps[1::2], _TRAINING, _GREY, "steps of training", alpha=0.3, linewidth=0)
    draw(record.stages, _STAGING, _STAGE, "staging: copy to memory", edgecolor=_STAGE)
    draw(record.writes, _WRITING, _WRITE, "writing: copy to disk", edgecolor=_WRITE)
    draw(record.stalls, _TRAINING, _STALL, "stall: training stands still", edgecolor=_STALL, zorder=2)


def _title(run: Run, checkpoints: Sequence[Saved]) -> str:
    steps = max(len(record.steps) for record in run.ranks)
    name = "/".join(run.directory.resolve().parts[-2:])
    ranks = counted(len(run.ranks), "rank")
    return f"{name}: {counted(steps, 'step')}, {counted(len(checkpoints), 'checkpoint')}, {ranks}"


def _subtitle(run: Run, checkpoints: Sequence[Saved], part: bool) -> Iterator[str]:
    """The text below the title; ``part`` where a part of the run is shown."""
    if part:
        yield "a stretch around the first checkpoints" if checkpoints else "its first steps"
    if stalls := [one.stall_s for one in checkpoints if one.stall_s is not None]:
        held = metric("stall_ms").text(1e3 * median(stalls))
        yield f"a checkpoint holds training for {held} (median of the slowest rank)"
    if len(run.ranks) > _MOST_RANKS:
        yield f"{_MOST_RANKS} of {len(run.ranks)} ranks: the first, and those that stood still for longest"
    if not run.finished:
        yield "the run was ended half-way or still goes on"
    if len({record.start.get("host") for record in run.ranks}) > 1:
        yield "clocks of several machines, which may differ"
