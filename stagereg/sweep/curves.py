"""What a run logged with ``stagereg.log``, as curves over its steps: the loss, and each other number in a small panel.

Needs matplotlib; the figure becomes a file by :mod:`stagereg.sweep.render.plots`, whose style it has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stagereg.sweep.render.plots import COLOURS, plain, styled
from stagereg.sweep.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curves_figure", "logged"]

_MOST = 9
"""Panels of one picture, three in a line."""


def logged(run: Run) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """What was logged, by name, and there by rank: (step, value) in the order of logging; NaN for no number.

    The loss comes first, the other names as they were first logged; ``samples`` are counts that figures are made of,
    and are left out.
    """
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {"loss": {}}
    for rank in run.ranks:
        for step, _, values in rank.logs:
            for name, value in values.items():
                points = curves.setdefault(name, {}).setdefault(rank.rank, [])
                points.append((step, math.nan if value is None else value))
    return {name: ranks for name, ranks in curves.items() if ranks and name != "samples"}


def curves_figure(run: Run) -> Figure | None:
    """Draw what ``run`` logged; ``None`` where there is nothing of that. Rank 0 in colour, the other ranks behind it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    shown = list(logged(run).items())[:_MOST]
    if not shown:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    across = min(len(shown), 3)
    down = math.ceil(len(shown) / across)
    with styled():
        figure = Figure(figsize=(12, 2.6 * down + 0.2))
        for at, (name, ranks) in enumerate(shown):
            axes = figure.add_subplot(down, across, at + 1)
            for rank in sorted(ranks, reverse=True):
                steps, values = zip(*ranks[rank], strict=True)
                colour, width = (COLOURS["best"], 1.5) if rank == min(ranks) else (COLOURS["plain"], 0.7)
                # A line alone would hide that there are few values, and show nothing of single ones.
                marker = "o" if len(values) <= 2 or any(map(math.isnan, values)) else ""
                axes.plot(steps, values, color=colour, linewidth=width, marker=marker, markersize=3)
            others = f", rank {min(ranks)} and the others (grey)" if len(ranks) > 1 else ""
            axes.set_title(plain(f"{name}{others}"))
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure
