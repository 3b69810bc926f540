"""Renders a comparison as tables, plots and an HTML report.

``tables`` prints tables and writes CSV, ``plots`` draws plots, ``page`` makes the HTML report. All use only the
comparison and the configs of its jobs. Importing this package imports neither matplotlib nor Jinja2.
"""

from __future__ import annotations

from pathlib import Path

import stagereg.sweep.render.page as page
import stagereg.sweep.render.plots as plots
import stagereg.sweep.render.tables as tables
from stagereg.base.output import warn
from stagereg.sweep.comparison import Comparison
from stagereg.sweep.result import write_whole

FILES = ("compare.csv", "compare.svg", "compare.png", "report.html")
"""The files that :func:`write` writes, in this order."""


def write(comparison: Comparison, directory: Path | str) -> list[Path]:
    """Write the files of ``comparison`` and return their paths.

    If there is nothing to draw, or no matplotlib, ``write`` leaves out the plots and removes older ones.
    """
    documents = {"compare.csv": tables.csv_text(comparison).encode()}
    try:
        if figure := plots.compare_figure(comparison):
            documents |= {f"compare.{kind}": plots.document(figure, kind) for kind in ("svg", "png")}
    except ImportError as error:
        warn(f"no plots ({error}). Run: pip install './stagereg[report]'")
    documents["report.html"] = page.compare_page(comparison, documents.get("compare.svg", b"")).encode()
    for name in FILES:
        if name not in documents:
            Path(directory, name).unlink(missing_ok=True)
    return [write_whole(Path(directory, name), documents[name]) for name in FILES if name in documents]
