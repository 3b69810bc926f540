"""Renders a comparison as tables, plots and an HTML report.

``tables`` prints tables and writes CSV, ``plots`` draws plots, and ``page`` creates the HTML report. The input is the
comparison and the configs of its jobs. Importing this package does not import matplotlib or Jinja2.
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
"""The names of the files that :func:`write` may write."""


def write(comparison: Comparison, directory: Path | str) -> list[Path]:
    """Write the report files of ``comparison`` into ``directory``, and return their paths.

    If matplotlib is not installed, or no metric has a value, no plots are written, and existing plots are deleted.
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
