"""Read single events from the file of :mod:`.record`. Parses only the needed lines, so that a run starts fast."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stagereg.base.record import run_of
from stagereg.base.small_files import open_regular
from stagereg.errors import MALFORMED

_MOST_BYTES = 1 << 33  # largest record in bytes: 100 million steps


def events(
    data: mmap.mmap, kind: bytes, at: int = 0, belongs: Callable[[dict[str, Any]], bool] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each readable event of a kind, with its offset, from offset ``at`` on. ``belongs`` filters the events."""
    head = _head(kind)
    while (at := data.find(head, at)) >= 0:
        with contextlib.suppress(*MALFORMED):
            event = _event(data, at)
            if belongs is None or belongs(event):
                yield at, event
        at += len(head)


def last_event(path: Path, kind: bytes, attempt: str) -> dict[str, Any] | None:
    """Return the last event of a kind that ``attempt`` recorded in a file; ``attempt`` may also be the name of a run.

    Returns ``None`` if no such event exists, or if the file cannot be read.
    """
    try:
        with mapped(path) as data:
            return last_of(data, kind, 0, lambda event: attempt in (event["run"], run_of(event["run"])))
    except (OSError, ValueError):  # the file is missing or empty, or not a regular file
        return None


def last_of(data: mmap.mmap, kind: bytes, since: int, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the last event of a kind that ``fits`` accepts, from offset ``since`` on; ``None`` if none exists."""
    head, at = _head(kind), len(data)
    while (at := data.rfind(head, since, at)) >= 0:
        with contextlib.suppress(*MALFORMED):
            event = _event(data, at)
            if fits(event):
                return event
    return None


def mapped(path: Path, size: int = 0) -> mmap.mmap:
    """Map the first ``size`` bytes of a file, by default all. Raises ``ValueError`` for a bad size, or ``OSError``."""
    with open(open_regular(path), "rb") as file:
        size = size or os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"{path} has more than {_MOST_BYTES:,} bytes")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _head(kind: bytes) -> bytes:
    return b'{"event":"%s",' % kind  # as `record` writes it; strings cannot contain it, as their quotes are escaped


def _event(data: mmap.mmap, at: int) -> dict[str, Any]:
    event = dict(json.loads(data[at : data.find(b"\n", at)]))
    return {**event, "run": str(event.get("run", ""))}
