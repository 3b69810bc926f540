"""A comparison for people: ``tables`` prints and makes CSV, ``page`` makes the HTML. Importing it imports no Jinja2."""

from __future__ import annotations

from pathlib import Path

import stagereg.sweep.render.page as page
import stagereg.sweep.render.tables as tables
from stagereg.sweep.comparison import Comparison
from stagereg.sweep.result import write_whole

FILES = ("compare.csv", "report.html")
"""What :func:`write` leaves in a directory, in this order."""


def write(comparison: Comparison, directory: Path | str) -> list[Path]:
    """Write the files of ``comparison`` and return their paths."""
    documents = tables.csv_text(comparison), page.compare_page(comparison)
    return [write_whole(Path(directory, name), text.encode()) for name, text in zip(FILES, documents, strict=True)]
