"""Print the output of commands: tables and lines for people, or one JSON document for programs.

A command calls :func:`table` and :func:`echo`, or, with ``--json``, :func:`as_json` once. Colours are printed only on a
terminal. Long cells in the last column are wrapped, never cut. All strings pass through :func:`.errors.printable`,
because they may come from untrusted files. Imports no slow modules.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from stagereg.errors import printable

_WIDTH = 120  # width of a line if stdout is not a terminal
_LEAST = 30  # least width of the last column of a table
_COLOURS = {
    **dict.fromkeys(("ok", "good", "valid", "kept", "better"), "green"),
    **dict.fromkeys(("warn", "skipped", "not shown", "unclear", "no checksums", "unfinished"), "yellow"),
    **dict.fromkeys(("broken", "corrupt", "failed", "worse"), "bold red"),
    **{"missing": "dim", "best": "bold green", "tie": "cyan"},
}
"""Styles of verdicts on a terminal; any other text is plain."""
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""The terminal code of each part of a style (ECMA-48)."""


def echo(text: str = "", style: str = "") -> None:
    """Print ``text``. On a terminal, it has the style ``style``, such as ``"bold"`` or ``"bold red"``."""
    print(_styled(printable(text), style))


def warn(text: str) -> None:
    """Print ``text`` to stderr, and flush stderr. One write, so that the lines of several ranks do not mix."""
    # With PYTHONUNBUFFERED=1, print() would write ``end`` separately.
    print(f"{printable(text)}\n", end="", file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: str = "") -> None:
    """Print a table. Cells may have several lines. An empty title is not printed.

    ``columns`` are the headings. With ``()``, the table has no headings, and the first row sets the number of columns.
    ``verdict`` is the heading of the column whose cells ("kept", "broken", "ok", "warn" …) are coloured.
    """
    print("\n".join(_lines(title, columns, rows, list(columns).index(verdict) if verdict else -1)))


def as_json(data: Any) -> None:
    """Print ``data`` as one JSON document. Values that JSON cannot represent, such as NaN, become strings."""
    text = json.dumps(json_numbers(data), indent=1, default=str, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"))  # JSON leaves this control character unescaped


def json_numbers(data: Any) -> Any:
    """Return ``data`` with the strings "nan", "inf" and "-inf" instead of these numbers, which JSON lacks."""
    if isinstance(data, dict):
        return {key: json_numbers(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [json_numbers(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def progress(what: str = "") -> None:
    """Replace the progress line on the terminal with ``what``, or clear it if ``what`` is empty."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{printable(what, lines=False)[:width]}", end="", file=sys.stderr, flush=True)


def size_text(nbytes: float) -> str:
    """Return a number of bytes with a unit, to three digits: ``"139 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def _styled(text: str, style: str) -> str:
    if not text or not style or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{';'.join(_CODES[part] for part in style.split())}m{text}\033[0m"


def line_width() -> int:
    """Return the width of a line in columns."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def _lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: int) -> Iterator[str]:
    if title:
        yield _styled(printable(title, lines=False), "bold")
    every = [[printable(cell) for cell in row] for row in ([columns, *rows] if columns else rows)]
    if not every:
        return
    wide = [max(len(line) for row in every for line in row[i].splitlines() or [""]) for i in range(len(every[0]) - 1)]
    rest = max(line_width() - sum(w + 2 for w in wide) - 2, _LEAST)
    if columns:
        wide_last = min(rest, max(len(line) for row in every for line in row[-1].splitlines() or [""]))
        every.insert(1, ["-" * w for w in (*wide, wide_last)])
    for row in every:
        cells = [cell.splitlines() or [""] for cell in row[:-1]]
        cells.append([part for line in row[-1].splitlines() or [""] for part in _folded(line, rest)])
        colour = _COLOURS.get(row[verdict], "") if verdict >= 0 else ""
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = [*(f"{part:{w}}" for part, w in zip(parts, wide, strict=False)), parts[-1]]
            if colour:
                padded[verdict] = _styled(padded[verdict], colour)
            yield ("  " + "  ".join(padded)).rstrip()


def _folded(line: str, width: int) -> list[str]:
    """Wrap a line between words to at most ``width`` characters. Keeps its indentation; longer words stay whole."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
