"""The earlier attempts of a run, as rank 0's record has them.

Several programs may record in one directory. An attempt belongs to this run if the same launcher started the attempt,
or if the attempt took steps with the same directory of checkpoints. A run ends with the attempt that completes. Only
the few lines that matter are parsed, since a start waits for them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagereg.base.record import run_of
from stagereg.base.small_files import open_regular
from stagereg.errors import MALFORMED

_MOST_BYTES = 1 << 33  # of a record: 100 million steps


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
    def read(cls, path: Path, size: int, run: str, checkpoints: str) -> Earlier | None:
        """Return the earlier attempts of ``run`` in the first ``size`` bytes of a record; ``None`` if there are none.

        ``checkpoints`` is the directory that the run saves to. Returns ``None`` as well if the file cannot be read.
        """
        try:
            with _mapped(path, size) as data:
                return _of(data, run, checkpoints) if size else None
        except (OSError, *MALFORMED):  # the file is missing or empty, or another program's
            return None


def _of(data: mmap.mmap, run: str, checkpoints: str) -> Earlier | None:
    every = [*_events(data, b"start"), *_events(data, b"begin"), *_events(data, b"restart")]
    attempts = {e["run"] for _, e in every if run_of(e["run"]) == run or (checkpoints and e.get("dir") == checkpoints)}

    def belongs(event: dict[str, Any]) -> bool:
        return event["run"] in attempts

    completed = [at for at, event in _events(data, b"end", 0, belongs) if event["status"] == "completed"]
    starts = [*_events(data, b"start", max(completed, default=0), belongs)]
    if not starts:
        return None
    (first, start), (at, last) = starts[0], starts[-1]
    own = _last(data, b"step", at, lambda event: event["run"] == last["run"])
    taken = own or _last(data, b"step", first, belongs)
    restarts = [event for _, event in _events(data, b"restart", first, belongs)]
    return Earlier(
        began=float(start["t"]),
        last=float((own or last)["t"]),
        step=None if taken is None else int(taken["step"]),
        attempts=len(starts),
        failures=len(restarts),
        stored=sum(event["origin"] in ("store", "") for event in restarts),
        failure=_failure([event for _, event in _events(data, b"end", at, lambda event: event["run"] == last["run"])]),
    )


def _failure(ends: list[dict[str, Any]]) -> dict[str, Any]:
    if not ends:
        return {"why": "its process was killed"}
    end = ends[-1]
    if end["status"] == "preempted":
        return {"ended": float(end["t"])}
    return {"why": str(end.get("error")), "noticed": float(end["t"])}


def _events(
    data: mmap.mmap, kind: bytes, at: int = 0, belongs: Callable[[dict[str, Any]], bool] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the readable events of a kind from ``at`` on, each with its place; only those that ``belongs`` accepts."""
    head = _head(kind)
    while (at := data.find(head, at)) >= 0:
        with contextlib.suppress(*MALFORMED):
            event = _event(data, at)
            if belongs is None or belongs(event):
                yield at, event
        at += len(head)


def last_event(path: Path, kind: bytes, attempt: str) -> dict[str, Any] | None:
    """Return the last event of a kind that an attempt, or any attempt of a run, has recorded in a file.

    Returns ``None`` if there is none, or if the file cannot be read.
    """
    try:
        with _mapped(path) as data:
            return _last(data, kind, 0, lambda event: attempt in (event["run"], run_of(event["run"])))
    except (OSError, ValueError):  # the file is missing or empty, or no file
        return None


def _last(data: mmap.mmap, kind: bytes, since: int, belongs: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    head, at = _head(kind), len(data)
    while (at := data.rfind(head, since, at)) >= 0:
        with contextlib.suppress(*MALFORMED):
            event = _event(data, at)
            if belongs(event):
                return event
    return None


def _mapped(path: Path, size: int = 0) -> mmap.mmap:
    """Map the first ``size`` bytes of a record, or all. Raises ``OSError``, or ``ValueError`` if it has none."""
    with open(open_regular(path), "rb") as file:
        size = size or os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise ValueError(f"{path} has more than {_MOST_BYTES:,} bytes")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _head(kind: bytes) -> bytes:
    return b'{"event":"%s",' % kind  # as `record` writes it; in a text the quotes would be escaped


def _event(data: mmap.mmap, at: int) -> dict[str, Any]:
    event = dict(json.loads(data[at : data.find(b"\n", at)]))
    return {**event, "run": str(event.get("run", ""))}
