"""What the commands print: tables and lines for people, one JSON document for programs.

A command calls :func:`table` and :func:`echo`, or, when ``--json`` was given, :func:`as_json` once and neither of them.
On a terminal that has rich they are drawn and coloured; elsewhere they are aligned plain text, so that a pipe or a log
gets text alone. Long cells of the last column are folded, never cut. Nothing here knows what it prints.

Imports nothing heavy: rich is imported when a terminal is there to be written to.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "add_command",
    "add_output_options",
    "as_json",
    "echo",
    "line_width",
    "progress",
    "size_text",
    "stdout_to_stderr",
    "table",
]

_WIDTH = 120
"""Columns of a line where there is no terminal."""
_LEAST = 30
"""Columns that the last column of a table gets, however few are left."""
_STYLES = {
    "ok": "green",
    "kept": "green",
    "complete": "green",
    "warn": "yellow",
    "skipped": "yellow",
    "not shown": "yellow",
    "missing": "dim",
    "broken": "bold red",
    "damaged": "bold red",
    "unclear": "yellow",
    "best": "bold green",
    "tie": "cyan",
    "failed": "bold red",
    "unfinished": "yellow",
}
"""Styles of verdicts on a terminal; any other text is plain."""


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_: str,
    run: Callable[[argparse.Namespace], int],
    more: str = "",
) -> argparse.ArgumentParser:
    """Add a command with ``--json``, and return its parser.

    Args:
        commands: of the program.
        name: of the command.
        help_: one line without a full stop.
        run: takes the parsed arguments and returns the exit code.
        more: sentences for its own help.
    """
    parser = commands.add_parser(name, help=help_, description=f"{help_[0].upper()}{help_[1:]}. {more}")
    parser.set_defaults(run=run)
    add_output_options(parser)
    return parser


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command; ``asked.json`` is then whether :func:`as_json` is wanted."""
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of text")


def echo(text: str = "", style: str = "") -> None:
    """Print ``text`` as it is, in a style of rich (``"bold"``, ``"bold red"``) on a terminal that has it."""
    if not _rich():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style), soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: str = "") -> None:
    """Print a table.

    Args:
        title: printed above it; empty for none.
        columns: their heads; ``()`` prints none, and the first row says how many there are.
        rows: cells of text, which may have several lines; each row has as many as there are columns.
        verdict: the head of the column of verdicts ("kept", "broken", "ok", "warn" …), to be coloured.
    """
    if _rich():
        _draw(title, columns, rows, verdict)
    else:
        print("\n".join(_lines(title, columns, rows, line_width())))


def as_json(data: Any) -> None:
    """Print ``data`` as one JSON document; what JSON has no type for is printed as its text."""
    print(json.dumps(data, indent=1, default=str, allow_nan=False))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is printed meanwhile: imported components may print, and a JSON document must stay alone.

    This holds for C and for child processes too, so no other thread may print meanwhile.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def progress(what: str = "") -> None:
    """Show on the terminal what is being waited for, in place of what was shown last; without ``what``, nothing."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{what[:width]}", end="", file=sys.stderr, flush=True)


def size_text(nbytes: float) -> str:
    """A number of bytes as people read it, to three digits: ``"139 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def _rich() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def line_width() -> int:
    """Columns of a line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], verdict: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD if columns else None, show_header=bool(columns), show_edge=False, pad_edge=False)
    heads = columns or [""] * (len(rows[0]) if rows else 0)
    for index, head in enumerate(heads):
        drawn.add_column(Text(head), overflow="fold", style="bold" if index == 0 else "", no_wrap=index == 0)
    for row in rows:
        cells = zip(heads, row, strict=True)
        drawn.add_row(
            *(Text(cell, _STYLES.get(cell, "") if verdict and head == verdict else "") for head, cell in cells)
        )
    if title:
        echo(title, "bold")
    Console(highlight=False).print(Padding(drawn, (0, 0, 0, 2)))


def _lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    if title:
        yield title
    every = [list(columns), *map(list, rows)] if columns else [list(row) for row in rows]
    if not every:
        return
    wide = [max(len(line) for row in every for line in row[i].splitlines() or [""]) for i in range(len(every[0]) - 1)]
    rest = max(width - sum(w + 2 for w in wide) - 2, _LEAST)
    if columns:
        wide_last = min(rest, max(len(line) for row in every for line in row[-1].splitlines() or [""]))
        every.insert(1, ["-" * w for w in (*wide, wide_last)])
    for row in every:
        cells = [cell.splitlines() or [""] for cell in row[:-1]]
        cells.append([part for line in row[-1].splitlines() or [""] for part in _folded(line, rest)])
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            yield "  " + "  ".join([*(f"{part:{w}}" for part, w in zip(parts, wide, strict=False)), parts[-1]]).rstrip()


def _folded(line: str, width: int) -> list[str]:
    """The line in parts of at most ``width`` characters where its words allow that; indented as it was."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
