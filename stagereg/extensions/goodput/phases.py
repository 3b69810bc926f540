"""Measure the phases of a start: the time from the last step before a failure to the first step after the restart.

Each phase in :data:`PHASES` is named after the event that ends the phase. This process records its own phases. Earlier
phases come from the rendezvous store, or from the events of the previous attempt (:mod:`.earlier`). At its first step,
rank 0 emits an event ``restart``, or ``begin`` if no failure preceded the start.
"""

from __future__ import annotations

import logging
import os
import textwrap
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import stagereg.base.first_step as first_step
import stagereg.base.record as record
from stagereg.extensions.goodput.earlier import Earlier, size_of

_log = logging.getLogger(__name__)

_SHOWN = 200  # characters of an error in the log

PHASES = {
    "noticed": "the failure was detected",
    "ended": "all ranks had exited",
    "started": "this process began",
    "imported": "torch and the program were imported",
    "connected": "the ranks were connected",
    "composed": "the config was composed",
    "grouped": "the process group was initialised",
    "restored": "the model was built and restored",
    "first step": "the first step was taken",
}
"""The phases of a start, in order, each with its last event."""


class _Start:
    def __init__(self, path: Path, attempt: str, told: Mapping[str, Any]) -> None:
        self._path, self._size, self._run, self._told = path, size_of(path), record.run_of(attempt), told
        self.checkpoints = ""  # the checkpoint directory of the run
        self.reported = False
        self.restored: tuple[int, str, str] | None = None

    @cached_property
    def earlier(self) -> Earlier | None:
        return Earlier.read(self._path, self._size, self._run, self.checkpoints)

    @property
    def failure(self) -> dict[str, Any]:
        """The failure before this start: the recorded reason and times, overridden by ``noted`` of :func:`begin`."""
        return {**(self.earlier.failure if self.earlier is not None else {}), **self._told}

    def report(self, step: int) -> None:
        self.reported = True
        known = {name: self.failure[name] for name in PHASES if self.failure.get(name) is not None}
        earlier = self.earlier
        moments = {**known, "started": process_start("self"), **_marks, "first step": time.time()}
        since = moments.get("launched", moments["started"]) if earlier is None else earlier.last
        phases, last = {}, since
        for name in PHASES:
            if name in moments:
                phases[name] = max(0.0, moments[name] - last)
                last = max(last, moments[name])
        reached, source, origin = self.restored or (step - 1, "", "")
        again = max(0, earlier.step - reached) if earlier is not None and earlier.step is not None else 0
        why = _sentence(self.failure.get("why", ""))
        number = self.failure.get("restart") or (1 if earlier is None else earlier.attempts)
        facts: dict[str, Any] = {"since": since, "phases": phases, "source": source, "origin": origin, "again": again}
        facts |= {"restored": reached, "dir": self.checkpoints}
        if not why:
            record.emit("begin", step=step, **facts)
            return
        record.emit("restart", step=step, number=number, why=why, **facts)
        notes = {"restored": source and f"from {source}", "first step": f"step {step}"}
        notes["first step"] += f"; {again} repeated" if again else ""
        rows = [f"  {name:<10} {seconds:8.2f} s  {notes.get(name, '')}".rstrip() for name, seconds in phases.items()]
        text = "stagereg: Restart %d took %.2f s from the last step before it to the first step after it. %s\n%s"
        _log.info(text, number, sum(phases.values()), textwrap.shorten(why, _SHOWN), "\n".join(rows))


# Global because a process starts once, before other objects exist.
_marks: dict[str, float] = {}
_start: _Start | None = None
_loaded = time.time()


def mark(phase: str, at: float | None = None) -> None:
    """Record the Unix time at which a phase of this start ended, by default now. ``launched``: the launcher started."""
    _marks[phase] = time.time() if at is None else at


def begin(directory: Path, attempt: str, noted: Mapping[str, Any] | None) -> None:
    """Begin an attempt that rank 0 is about to record in ``directory``.

    ``noted`` is the failure that the launcher, or a rank of the previous attempt, reported: the reason ``why`` and the
    Unix time ``noticed``. A launcher adds the Unix time ``ended``, when all ranks had exited, and the number of the
    restart, ``restart``.
    """
    global _start
    _start = _Start(directory / record.file_name(0), attempt, noted or {})


def saves_to(directory: str) -> None:
    """Set the checkpoint directory, with which :mod:`.earlier` finds the attempts of this run."""
    if _start is not None and not _start.reported:
        _start.checkpoints = directory
        vars(_start).pop("earlier", None)


def restored(step: int, source: str, origin: str) -> None:
    """Record that the run resumes from ``step`` in ``source``; 0 and ``""`` if it starts from scratch.

    ``origin`` is ``"tier"``, ``"store"``, ``"survivors"`` for an emergency save in storage, or ``""``.
    """
    mark("restored")
    if _start is not None:
        _start.restored = (step, source, origin)


def take_step(step: int) -> None:
    """Record that this process took a step. The first step of an attempt also records the phases of the start."""
    first_step.take_step()
    record.emit("step", step=step)
    if _start is not None and not _start.reported:
        _start.report(step)


def mtbf_s(expected_s: float, in_tier: bool) -> float:
    """Estimate the mean time between failures in seconds, from ``expected_s`` and this run's failures. Only on rank 0.

    The estimate begins with one failure in ``expected_s`` seconds. With ``in_tier``, all failures count; otherwise only
    the last failure, and failures after which the run resumed from storage.
    """
    if _start is None or (earlier := _start.earlier) is None:
        return expected_s
    seen = (earlier.failures if in_tier else earlier.stored) + ("why" in _start.failure)
    return (expected_s + time.time() - earlier.began) / (1 + seen)


def _sentence(why: str) -> str:
    """Return the first line of a failure report. The last line of a traceback replaces the traceback's first line."""
    lines = why.strip().splitlines() or [""]
    return lines[0].removesuffix(" Error on this rank:").replace("Traceback (most recent call last):", lines[-1])


def process_start(process: str) -> float:
    """Return the Unix time at which a process started; on other systems than Linux, when this module was imported."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return _loaded
    return time.time() - age
