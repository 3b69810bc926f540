"""Read the earlier attempts (starts of all ranks) of a run from the events that rank 0 recorded.

Several programs may record events in one directory. An attempt belongs to this run if the same launcher started the
attempt, or if the attempt took steps with the same checkpoint directory. A run ends with the first attempt that
completes. Parses only the needed lines, so that a run starts fast.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagereg.base.record import run_of
from stagereg.base.recorded import events, last_of, mapped
from stagereg.errors import MALFORMED


def size_of(path: Path) -> int:
    """Return the size of a record in bytes; 0 if the file does not exist."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


@dataclass(frozen=True)
class Earlier:
    """A summary of the attempts before the current attempt. Times are Unix times in seconds."""

    began: float  # start of the first attempt
    last: float  # last step of the previous attempt, or the start of that attempt if it took no step
    step: int | None  # the last step of the run; `None` before the first step
    attempts: int
    failures: int  # failures after which training resumed
    stored: int  # failures after which training resumed from a periodic checkpoint in storage, or from scratch
    # The failure of the previous attempt: the reason ``why``, the time of its detection ``noticed``, the time ``ended``
    failure: dict[str, Any]

    @classmethod
    def read(cls, path: Path, size: int, run: str, checkpoints: str) -> Earlier | None:
        """Return the earlier attempts of ``run`` in the first ``size`` bytes of a record; ``None`` if none exist.

        ``checkpoints`` is the checkpoint directory of the run. Also returns ``None`` if the file cannot be read.
        """
        try:
            with mapped(path, size) as data:
                return _of(data, run, checkpoints) if size else None
        except (OSError, *MALFORMED):  # the file is missing or empty, or belongs to another program
            return None


def _of(data: mmap.mmap, run: str, checkpoints: str) -> Earlier | None:
    every = [*events(data, b"start"), *events(data, b"begin"), *events(data, b"restart")]
    attempts = {e["run"] for _, e in every if run_of(e["run"]) == run or (checkpoints and e.get("dir") == checkpoints)}

    def belongs(event: dict[str, Any]) -> bool:
        return event["run"] in attempts

    completed = [at for at, event in events(data, b"end", 0, belongs) if event["status"] == "completed"]
    starts = [*events(data, b"start", max(completed, default=0), belongs)]
    if not starts:
        return None
    (first, start), (at, last) = starts[0], starts[-1]
    own = last_of(data, b"step", at, lambda event: event["run"] == last["run"])
    taken = own or last_of(data, b"step", first, belongs)
    restarts = [event for _, event in events(data, b"restart", first, belongs)]
    return Earlier(
        began=float(start["t"]),
        last=float((own or last)["t"]),
        step=None if taken is None else int(taken["step"]),
        attempts=len(starts),
        failures=len(restarts),
        stored=sum(event["origin"] in ("store", "") for event in restarts),
        failure=_failure([event for _, event in events(data, b"end", at, lambda event: event["run"] == last["run"])]),
    )


def _failure(ends: list[dict[str, Any]]) -> dict[str, Any]:
    if not ends:
        return {"why": "its process was killed"}
    end = ends[-1]
    if end["status"] == "preempted":
        return {"ended": float(end["t"])}
    return {"why": str(end.get("error")), "noticed": float(end["t"])}
