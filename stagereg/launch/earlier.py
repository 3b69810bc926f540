"""The attempts of a run before this one, as rank 0's record has them.

Attempts that use one directory follow each other in one file, and a run ends with the attempt that completes. Only the
few lines that matter are parsed, since a start waits for them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Earlier:
    """What came before an attempt. Times are seconds since the epoch."""

    began: float  # when the first attempt did
    last: float  # when the attempt before took its last step, or began if it took none
    step: int | None  # the last step that was taken; `None` if there was none yet
    attempts: int
    failures: int  # that training went on after
    stored: int  # of these, after how many it went on from a periodic checkpoint of the store, or from nothing
    # How the attempt before ended: ``why``, unless in order; when that was ``noticed``; when it had ``ended``
    failure: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Earlier | None:
        """Return what a record has; ``None`` if no run has begun in it, or it cannot be read."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _of(data)
        except (OSError, LookupError, TypeError, ValueError):  # not there, empty, or not ours
            return None


def _of(data: mmap.mmap) -> Earlier | None:
    completed = [at for at, event in _events(data, b"end") if event["status"] == "completed"]
    starts = [*_events(data, b"start", max(completed, default=0))]
    if not starts:
        return None
    (first, start), (at, last) = starts[0], starts[-1]
    own = _last(data, b"step", at)
    taken = own or _last(data, b"step", first)
    restarts = [event for _, event in _events(data, b"restart", first)]
    return Earlier(
        began=float(start["t"]),
        last=float((own or last)["t"]),
        step=None if taken is None else int(taken["step"]),
        attempts=len(starts),
        failures=len(restarts),
        stored=sum(event["origin"] in ("store", "") for event in restarts),
        failure=_failure([event for _, event in _events(data, b"end", at)]),
    )


def _failure(ends: list[dict[str, Any]]) -> dict[str, Any]:
    if not ends:
        return {"why": "its process was killed"}
    end = ends[-1]
    if end["status"] == "preempted":
        return {"ended": float(end["t"])}
    return {"why": str(end.get("error")), "noticed": float(end["t"])}


def _events(data: mmap.mmap, kind: bytes, at: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a kind from ``at`` on, each with where it is; without damaged ones."""
    head = _head(kind)
    while (at := data.find(head, at)) >= 0:
        with contextlib.suppress(ValueError):
            yield at, _event(data, at)
        at += len(head)


def last_event(path: Path, kind: bytes) -> dict[str, Any] | None:
    """Return the last event of a kind in a record; ``None`` if there is none, or the file cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _last(data, kind, 0)
    except (OSError, ValueError):  # not there, or empty
        return None


def _last(data: mmap.mmap, kind: bytes, since: int) -> dict[str, Any] | None:
    head, at = _head(kind), len(data)
    while (at := data.rfind(head, since, at)) >= 0:
        with contextlib.suppress(ValueError):
            return _event(data, at)
    return None


def _head(kind: bytes) -> bytes:
    return b'{"event":"%s",' % kind  # as `record` writes it; in a text the quotes would be escaped


def _event(data: mmap.mmap, at: int) -> dict[str, Any]:
    return dict(json.loads(data[at : data.find(b"\n", at)]))
