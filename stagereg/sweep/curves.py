"""What a run logged with ``stagereg.log``, as curves over its steps: a panel for each name, a line for each rank.

Needs matplotlib; the figure becomes a file by :mod:`stagereg.sweep.render.plots`, whose style it has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from stagereg.sweep.render.plots import plain, styled
from stagereg.sweep.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curves_figure"]

_MOST = 9
"""Panels of one picture, three in a line."""


def curves_figure(run: Run) -> Figure | None:
    """Draw what ``run`` logged; ``None`` where that is nothing but ``samples``, which figures are made of.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    curves: defaultdict[str, dict[int, list[tuple[int, float]]]] = defaultdict(dict)
    for rank in run.ranks:
        for step, _, values in rank.logs:
            for name, value in values.items():
                curves[name].setdefault(rank.rank, []).append((step, math.nan if value is None else value))
    names = [name for name in curves if name != "samples"][:_MOST]
    if not names:
        return None
    from matplotlib.figure import Figure

    across = min(len(names), 3)
    down = math.ceil(len(names) / across)
    with styled():
        figure = Figure(figsize=(12, 2.6 * down + 0.2))
        for at, name in enumerate(names):
            axes = figure.add_subplot(down, across, at + 1, xlabel="step", title=plain(name))
            for number, points in curves[name].items():
                axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=f"rank {number}")
            if 1 < len(curves[name]) <= _MOST:
                axes.legend()
    return figure
