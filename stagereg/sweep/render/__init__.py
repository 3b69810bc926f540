"""A comparison for people: tables, the picture, and the page, all from the same rows.

``tables`` prints and makes CSV, ``plots`` draws, ``page`` makes the HTML; :func:`write` leaves the files
of a sweep. Only reads what it is given and the configs of the jobs; so a sweep can be rendered again at any time.
Importing this imports neither matplotlib nor Jinja2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import stagereg.sweep.render.page as page
import stagereg.sweep.render.plots as plots
import stagereg.sweep.render.tables as tables
from stagereg.sweep.comparison import Comparison

FILES = ("compare.csv", "compare.svg", "compare.png", "report.html")
"""What :func:`write` leaves in a directory, in this order."""


def write(comparison: Comparison, directory: Path | str) -> list[Path]:
    """Write the files of ``comparison`` and return their paths; who calls is one process.

    Where there is nothing to draw, or no matplotlib, the pictures are left out (older ones are removed); the latter is
    reported on stderr in a line.
    """
    documents = {"compare.csv": tables.csv_text(comparison).encode()}
    try:
        figure = plots.compare_figure(comparison)
        if figure is not None:
            documents |= {f"compare.{kind}": plots.document(figure, kind) for kind in ("svg", "png")}
    except ImportError as error:
        print(f"no picture ({error}): pip install 'hydra-stagereg[report]'", file=sys.stderr)
    documents["report.html"] = page.compare_page(comparison, documents.get("compare.svg", b"")).encode()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if name in documents:
            temporary = directory / f".{name}.{os.getpid()}.tmp"  # a sweep may end while its report is made
            temporary.write_bytes(documents[name])
            temporary.replace(directory / name)
        else:
            (directory / name).unlink(missing_ok=True)
    return [directory / name for name in FILES if name in documents]
