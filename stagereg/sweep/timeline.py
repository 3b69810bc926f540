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
from dataclasses import dataclass
from math import isinf
from statistics import median
from typing import TYPE_CHECKING, Any

from stagereg.errors import ConfigError
from stagereg.sweep.checkpoints import Saved, saved
from stagereg.sweep.metric import counted
from stagereg.sweep.render.plots import COLOURS, plain, styled
from stagereg.sweep.run import RankRecord, Run, Span
from stagereg.sweep.steps import with_data, without_stalls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_window", "timeline_figure", "usual_window"]

_STEPS = ((COLOURS["plain"], 0.55), (COLOURS["plain"], 0.3))
"""Colours of steps in turn, with how much of the ground they cover."""
_STALL = COLOURS["failed"]
_STAGE = COLOURS["best"]
_WRITE = COLOURS["good"]
_CHECKPOINT = COLOURS["plain"]
_FAINT = COLOURS["muted"]
_INK = COLOURS["ink"]

_MOST_STEPS = 120
"""Steps that a picture can show one by one; a longer run is shown by a window."""
_MOST_CHECKPOINTS = 12
_FIRST_CHECKPOINTS = 4
"""Checkpoints in the window of a long run, where so many steps allow that."""
_AROUND = 3
"""Steps before the first checkpoint of that window and after the last one."""
_MERGED_FROM = 600
"""Steps of a rank in one picture from which on they are drawn as stretches, not one by one."""
_TOUCHING_S = 1e-6
"""Seconds between two bars that are rounding alone: times since the epoch have no more digits."""
_MOST_RANKS = 12
_WIDTH = 12.0
"""Inches."""
_LABEL = 0.055
"""The space that the label of a bar needs, as a part of the axis."""
_MARGIN = 0.01
"""What is left free before the first thing of a run and after the last one, as a part of the axis."""


@dataclass(frozen=True)
class _Bar:
    """A stretch of time, seconds since the start of the run."""

    start: float
    end: float

    def meets(self, window: tuple[float, float]) -> bool:
        return self.end >= window[0] and self.start <= window[1]


@dataclass(frozen=True)
class _Lane:
    """A rank and its steps, which are many and made only once."""

    rank: RankRecord
    steps: list[_Bar]


def timeline_figure(run: Run, window: tuple[float, float] | None = None) -> Figure:
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

    lanes = _lanes(run)
    checkpoints = saved(run)
    shown = _checked(run, lanes, window) if window is not None else _usual(run, lanes, checkpoints)
    drawn_lanes = _chosen(lanes)
    last = max((lane.steps[-1].end for lane in lanes if lane.steps), default=0.0)
    with styled():
        height = 1.9 + 0.95 * len(drawn_lanes) + 0.35
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.add_axes((0.085, 0.95 / height, 0.9, 1 - 1.6 / height))
        _prepare(axes, len(drawn_lanes), shown)
        met = [one for one in checkpoints if one.end >= shown[0] and one.start <= shown[1]]
        drawn = _draw_checkpoints(axes, met, shown)
        for index, lane in enumerate(drawn_lanes):
            drawn |= _draw_rank(axes, index, lane, run, last, shown)
        parts = _subtitle(run, lanes, checkpoints, shown, usual=window is None)
        title = _title(run, lanes, checkpoints, shown)
        figure.text(0.012, 1 - 0.12 / height, plain(title), fontsize=12, weight="bold", va="top", color=_INK)
        figure.text(0.012, 1 - 0.38 / height, plain("; ".join(parts)), fontsize=9, va="top", color=_FAINT)
        figure.legend(
            handles=[artist for name, artist in _legend().items() if name in drawn],
            loc="lower left",
            bbox_to_anchor=(0.08, 0.0),
            ncols=6,
            fontsize=8.5,
            handlelength=1.4,
            columnspacing=1.6,
        )
    return figure


def check_window(run: Run, window: tuple[float, float]) -> None:
    """Raise ``ConfigError`` if there is nothing of ``run`` in ``window``, or nothing to draw at all."""
    _checked(run, _lanes(run), window)


def usual_window(run: Run) -> tuple[float, float]:
    """Return what is shown of a run by default, seconds since its start.

    That is all of it from its first step on, or, of a run that is too long to see its steps, a stretch around the first
    checkpoints.

    Raises:
        ConfigError: there is nothing of the run to draw.
    """
    return _usual(run, _lanes(run), saved(run))


# -- the window


def _usual(run: Run, lanes: Sequence[_Lane], checkpoints: Sequence[Saved]) -> tuple[float, float]:
    whole = _whole(run, lanes)
    ends = [bar.end for bar in max((lane.steps for lane in lanes), key=len)]
    if len(ends) <= _MOST_STEPS and len(checkpoints) <= _MOST_CHECKPOINTS:
        return whole
    if not checkpoints:
        return whole[0], ends[_MOST_STEPS - 1]
    first = max(bisect_right(ends, checkpoints[0].start) - 1 - _AROUND, 0)
    # Ranks need not be at the same step at the same time.
    start = min(max(ends[first], whole[0]), checkpoints[0].start) if ends else whole[0]
    end = 0.0
    for count, one in enumerate(checkpoints[:_FIRST_CHECKPOINTS]):
        after = bisect_right(ends, one.end) + _AROUND
        if count and after - first > _MOST_STEPS:
            break
        end = max(end, one.end, ends[min(after, len(ends) - 1)] if ends else 0.0)
    return start, end


def _whole(run: Run, lanes: Sequence[_Lane]) -> tuple[float, float]:
    """From the first step to the last thing that is known, with a margin."""
    began = run.began
    starts: list[float] = []
    ends: list[float] = []
    for lane in lanes:
        spans = (*lane.rank.stalls, *lane.rank.stages, *lane.rank.writes)
        bars = [*lane.steps[1:2], *(_bar(span, began) for span in spans)]
        starts += [bar.start for bar in bars or lane.steps]
        ends += [bar.end for bar in (*bars, *lane.steps[-1:])]
    if not ends:
        raise ConfigError(
            f"{run.directory} has no steps and no checkpoints to draw: it ended before its first step, "
            "or it trained without a stagereg.Checkpointer and logged nothing by stagereg.log."
        )
    margin = _MARGIN * (max(ends) - min(starts)) or 1e-3
    return max(min(starts) - margin, 0.0), max(ends) + margin


def _checked(run: Run, lanes: Sequence[_Lane], window: tuple[float, float]) -> tuple[float, float]:
    whole = _whole(run, lanes)
    start, end = window[0], min(window[1], whole[1]) if isinf(window[1]) else window[1]
    if not start < end or start > whole[1] or end < 0:
        raise ConfigError(
            f"There is nothing to draw from {start:g} s to {end:g} s: the run has steps and checkpoints from "
            f"{whole[0]:.1f} s to {whole[1]:.1f} s after its start. A window is START:END in seconds, START first."
        )
    return start, end


# -- what there is to draw


def _lanes(run: Run) -> list[_Lane]:
    began = run.began
    return [_Lane(rank, [_bar(span, began) for span in without_stalls(rank)]) for rank in run.ranks]


def _bar(span: Span, began: float) -> _Bar:
    begin = span.start - began
    return _Bar(begin, begin + span.seconds)


def _chosen(lanes: Sequence[_Lane]) -> list[_Lane]:
    """The ranks that are drawn: all of them, or rank 0 and those that stood still for longest."""
    if len(lanes) <= _MOST_RANKS:
        return list(lanes)
    by_stall = sorted(lanes[1:], key=lambda lane: -sum(span.seconds for span in lane.rank.stalls))
    return sorted([lanes[0], *by_stall[: _MOST_RANKS - 1]], key=lambda lane: lane.rank.rank)


def _shadowing(lane: _Lane, last: float) -> _Bar | None:
    """The time in which a rank that had left its loop answered the collectives of the others."""
    joined = lane.rank.join or {}
    if not joined.get("shadowed") or not lane.steps or with_data(lane.rank) < len(lane.steps):
        return None
    return _Bar(lane.steps[-1].end, last) if last > lane.steps[-1].end else None


# -- the picture: the top lane is at 0, rank ``index`` has its three lanes from 1 + 2 * index on, and y points down


def _prepare(axes: Axes, ranks: int, window: tuple[float, float]) -> None:
    axes.set_xlim(*window)
    axes.set_ylim(1 + 2 * ranks, -0.1)
    axes.set_xlabel("seconds since the start of the run", fontsize=9, color=_FAINT)
    axes.tick_params(axis="both", length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_yticks([])


def _draw_checkpoints(axes: Axes, checkpoints: Sequence[Saved], window: tuple[float, float]) -> set[str]:
    _lane(axes, 0.5, "checkpoint\nof step", _FAINT, 8)
    below = axes.get_ylim()[0]
    for whole, colour in ((True, _CHECKPOINT), (False, _STALL)):
        starts, ends = [], []
        for one in checkpoints:
            if (one.state == "complete") == whole:
                starts.append(one.start)
                ends.append(one.end)
        axes.hlines([0.62] * len(starts), starts, ends, color=colour, linewidth=2.2)
        axes.vlines(starts, 0.45, below, color=colour, linewidth=0.7, linestyle=(0, (2, 2)), zorder=1.5)
    for one, at in _apart(checkpoints, [one.start for one in checkpoints], window[1] - window[0]):
        whole = one.state == "complete"
        if window[0] <= at <= window[1]:
            text = str(one.step) if whole else f"{one.step} {one.state}"
            side = "right" if at > window[1] - 2 * _LABEL * (window[1] - window[0]) and not whole else "left"
            axes.text(at, 0.38, text, fontsize=8.5, color=_INK if whole else _STALL, va="bottom", ha=side)
    return {"checkpoint"} if checkpoints else set()


def _draw_rank(axes: Axes, index: int, lane: _Lane, run: Run, last: float, window: tuple[float, float]) -> set[str]:
    """Draw the three lanes of a rank; return what was drawn, by its name in the legend."""
    top, rank, began = 1 + 2 * index, lane.rank, run.began
    drawn = _draw_steps(axes, (top + 0.16, 0.74), lane, last, window)
    for spans, colour, y, name in ((rank.stages, _STAGE, 0.98, "stage"), (rank.writes, _WRITE, 1.36, "write")):
        bars = [bar for span in spans if (bar := _bar(span, began)).meets(window)]
        _bars(axes, bars, (top + y, 0.3), colour, edgecolor=colour, linewidth=0.5, zorder=3)
        _label_inside(axes, bars, top + y + 0.16, window)
        drawn |= {name} if bars else set()
    stalls = [bar for span in rank.stalls if (bar := _bar(span, began)).meets(window)]
    _bars(axes, stalls, (top + 0.16, 0.74), _STALL, edgecolor=_STALL, linewidth=0.9, zorder=4)
    for bar, at in _apart(stalls, [(bar.start + bar.end) / 2 for bar in stalls], window[1] - window[0]):
        if window[0] <= at <= window[1]:
            text = _duration(bar.end - bar.start)
            ground = {"facecolor": COLOURS["surface"], "edgecolor": "none", "pad": 0.6}
            axes.text(at, top + 0.12, text, fontsize=7.5, color=_STALL, ha="center", va="bottom", bbox=ground)
    _lane(axes, top + 0.53, f"rank {rank.rank}", _INK, 10)
    _lane(axes, top + 1.13, "staging", _STAGE, 8)
    _lane(axes, top + 1.51, "writing", _WRITE, 8)
    return drawn | ({"stall"} if stalls else set())


def _label_inside(axes: Axes, bars: Sequence[_Bar], y: float, window: tuple[float, float]) -> None:
    for bar in bars:
        start, end = max(bar.start, window[0]), min(bar.end, window[1])
        if end - start >= _LABEL * (window[1] - window[0]):
            text = _duration(bar.end - bar.start)
            axes.text(
                (start + end) / 2, y, text, fontsize=7.5, color=COLOURS["surface"], ha="center", va="center", zorder=5
            )


def _draw_steps(
    axes: Axes, where: tuple[float, float], lane: _Lane, last: float, window: tuple[float, float]
) -> set[str]:
    first, rest = lane.steps[:1], lane.steps[1:]
    full_steps = max(with_data(lane.rank) - 1, 0)
    full = [(index, bar) for index, bar in enumerate(rest[:full_steps]) if bar.meets(window)]
    empty = [bar for bar in rest[full_steps:] if bar.meets(window)]
    shadowing = _shadowing(lane, last)
    empty += [shadowing] if shadowing is not None and shadowing.meets(window) else []
    if len(full) + len(empty) > _MERGED_FROM:
        _bars(axes, list(_stretches([bar for _, bar in full])), where, *_STEPS[0], linewidth=0, zorder=2)
        empty = list(_stretches(empty))
    else:
        for shade in (0, 1):
            bars = [bar for index, bar in full if index % 2 == shade]
            _bars(axes, bars, where, *_STEPS[shade], linewidth=0, zorder=2)
    _bars(axes, empty, where, "none", hatch="////", edgecolor=_CHECKPOINT, linewidth=0.3, zorder=2)
    opening = [bar for bar in first if bar.meets(window)]
    _bars(axes, opening, where, "none", edgecolor=_CHECKPOINT, linewidth=0.8, linestyle=(0, (3, 2)), zorder=2)
    seen = [bar for bar in opening if bar.end - window[0] > 2 * _MARGIN * (window[1] - window[0])]
    return {name for name, bars in (("first", seen), ("step", full), ("empty", empty)) if bars}


def _bars(
    axes: Axes, bars: Sequence[_Bar], where: tuple[float, float], colour: str, alpha: float = 1.0, **looks: Any
) -> None:
    if bars:
        lengths = [(bar.start, bar.end - bar.start) for bar in bars]
        axes.broken_barh(lengths, where, facecolors=colour, alpha=alpha, **looks)


def _stretches(bars: Sequence[_Bar]) -> Iterator[_Bar]:
    """Bars that touch each other as one."""
    begin = end = None
    for bar in bars:
        if begin is None or end is None:
            begin, end = bar.start, bar.end
        elif bar.start <= end + _TOUCHING_S:
            end = max(end, bar.end)
        else:
            yield _Bar(begin, end)
            begin, end = bar.start, bar.end
    if begin is not None and end is not None:
        yield _Bar(begin, end)


def _apart(things: Sequence[Any], positions: Sequence[float], width: float) -> Iterator[tuple[Any, float]]:
    """Those of the things, with their positions, that have space for a label beside the one before them."""
    last = -float("inf")
    for thing, at in zip(things, positions, strict=True):
        if at - last >= _LABEL * width:
            yield thing, at
            last = at


def _lane(axes: Axes, y: float, name: str, colour: str, size: float) -> None:
    """Name a lane at its left."""
    axes.text(
        -0.008,
        y,
        name,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=size,
        color=colour,
        linespacing=0.95,
    )


def _duration(seconds: float) -> str:
    """A time as people write it."""
    number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{number:.{0 if number >= 100 else 1 if number >= 1 else 2}f} {unit}"


def _title(run: Run, lanes: Sequence[_Lane], checkpoints: Sequence[Saved], window: tuple[float, float]) -> str:
    steps = max(len(lane.steps) for lane in lanes)
    name = "/".join(run.directory.resolve().parts[-2:])
    title = (
        f"{name}: {counted(steps, 'step')}, {counted(len(checkpoints), 'checkpoint')}, {counted(len(lanes), 'rank')}"
    )
    whole = _whole(run, lanes)
    if window[0] <= whole[0] and window[1] >= whole[1]:
        return title
    digits = 1 if window[1] - window[0] >= 1 else 3
    return f"{title}, {window[0]:.{digits}f} s to {window[1]:.{digits}f} s of {whole[1]:.1f} s"


def _subtitle(
    run: Run, lanes: Sequence[_Lane], checkpoints: Sequence[Saved], window: tuple[float, float], usual: bool
) -> Iterator[str]:
    """The text below the title."""
    if usual and window != _whole(run, lanes):
        yield "a stretch around the first checkpoints" if checkpoints else "its first steps"
    if stalls := [one.stall_s for one in checkpoints if one.stall_s is not None]:
        yield f"a checkpoint holds training for {_duration(median(stalls))} (median of the slowest rank)"
    if (beside := _beside(run)) is not None:
        yield f"{100 * beside:.0f}% of staging and writing went on beside training"
    if len(lanes) > _MOST_RANKS:
        yield f"{_MOST_RANKS} of {len(lanes)} ranks: the first, and those that stood still for longest"
    if not run.finished:
        yield "the run was ended half-way or still goes on"
    if len({rank.start.get("host") for rank in run.ranks}) > 1:
        yield "clocks of several machines, which may differ"


def _beside(run: Run) -> float | None:
    """The part of the time in which ranks staged or wrote that training did not stand still for, 0 to 1."""
    began = run.began
    at_work = waited = 0.0
    for rank in run.ranks:
        work = list(_stretches(sorted((_bar(span, began) for span in (*rank.stages, *rank.writes)), key=_begin)))
        stalls = list(_stretches(sorted((_bar(span, began) for span in rank.stalls), key=_begin)))
        at_work += _length(work)
        # What both cover is what is left of the sum of both when what either covers is taken away.
        waited += _length(work) + _length(stalls) - _length(_stretches(sorted([*work, *stalls], key=_begin)))
    return max(1 - waited / at_work, 0.0) if at_work else None


def _begin(bar: _Bar) -> float:
    return bar.start


def _length(bars: Iterable[_Bar]) -> float:
    return sum(bar.end - bar.start for bar in bars)


def _legend() -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return {
        "step": Patch(facecolor=_STEPS[0][0], alpha=_STEPS[0][1], label="steps of training"),
        "first": Patch(facecolor="none", edgecolor=_CHECKPOINT, linestyle="--", label="start, up to the first step"),
        "empty": Patch(facecolor="none", edgecolor=_CHECKPOINT, hatch="////", label="steps without data"),
        "stall": Patch(facecolor=_STALL, label="stall: training stands still"),
        "stage": Patch(facecolor=_STAGE, label="staging: copy to memory"),
        "write": Patch(facecolor=_WRITE, label="writing: copy to disk"),
        "checkpoint": Line2D([], [], color=_CHECKPOINT, linewidth=2.2, label="checkpoint, until complete"),
    }
