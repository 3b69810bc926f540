"""How long a start took, by phase: from the last step before a failure to the first one after it.

Each of :data:`PHASES` ends at the moment that it is named after. This process marks its own phases; a note in the run's
store, or the record of the last attempt (:mod:`.earlier`) has the earlier ones.
At its first step rank 0 emits an event ``restart``, or ``begin`` if no failure came before.
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
from stagereg.extensions.goodput.earlier import Earlier

_log = logging.getLogger(__name__)

_SHOWN = 200  # characters of an error in the log

PHASES = {
    "noticed": "the failure was noticed",
    "ended": "all ranks had ended",
    "started": "this process began",
    "imported": "torch and the program were imported",
    "connected": "the ranks had found each other",
    "composed": "the config was composed",
    "grouped": "the process group was made",
    "restored": "the model was built and restored",
    "first step": "the first step was taken",
}
"""The phases of a start, in order, and what ends them."""


class _Start:
    def __init__(self, path: Path, attempt: str, told: Mapping[str, Any]) -> None:
        self._path, self._size, self._run, self._told = path, record.size_of(path), record.run_of(attempt), told
        self.checkpoints = ""  # the directory that the run saves to
        self.reported = False
        self.restored: tuple[int, str, str] | None = None

    @cached_property
    def earlier(self) -> Earlier | None:
        return Earlier.read(self._path, self._size, self._run, self.checkpoints)

    @property
    def failure(self) -> dict[str, Any]:
        """The failure that this start follows; what this attempt was told of it comes before the record."""
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
        notes["first step"] += f"; {again} done again" if again else ""
        rows = [f"  {name:<10} {seconds:8.2f} s  {notes.get(name, '')}" for name, seconds in phases.items()]
        text = "stagereg: restart %d, %.2f s from the last step to the first one after it. %s\n%s"
        _log.info(
            text, number, sum(phases.values()), textwrap.shorten(why, _SHOWN), "\n".join(line.rstrip() for line in rows)
        )


# Global because a process starts once, before there is anything to ask.
_marks: dict[str, float] = {}
_start: _Start | None = None
_loaded = time.time()


def mark(phase: str, at: float | None = None) -> None:
    """A phase of this process's start ends now, or at a moment; ``launched`` is when the run's launcher began."""
    _marks[phase] = time.time() if at is None else at


def begin(directory: Path, attempt: str, noted: Mapping[str, Any] | None) -> None:
    """Begin an attempt that rank 0 is about to record in ``directory``.

    ``noted`` is what the launcher, or a rank of the previous attempt, noted of the failure: ``why``, a sentence; when
    it was ``noticed`` and, by a launcher, all ranks had ``ended``, in unix seconds; which ``restart`` it is, from 1.
    """
    global _start
    _start = _Start(directory / record.file_name(0), attempt, noted or {})


def saves_to(directory: str) -> None:
    """Set the directory of checkpoints by which :mod:`.earlier` finds the attempts of this run."""
    if _start is not None and not _start.reported:
        _start.checkpoints = directory
        vars(_start).pop("earlier", None)


def restored(step: int, source: str, origin: str) -> None:
    """The run goes on from ``step``, which was read from ``source``; or from nothing, 0 and ``""``.

    ``origin`` is ``"tier"``, ``"store"``, ``"survivors"`` for what those who were left have saved there, or ``""``.
    """
    mark("restored")
    if _start is not None:
        _start.restored = (step, source, origin)


def take_step(step: int) -> None:
    """Record that a step was taken; the first of an attempt with how it started."""
    first_step.take_step()
    record.emit("step", step=step)
    if _start is not None and not _start.reported:
        _start.report(step)


def mtbf_s(expected_s: float, in_tier: bool) -> float:
    """Return the mean time between failures in seconds, by what is expected and what this run has seen, on rank 0.

    What is expected counts as one failure seen in that time. ``in_tier``: all failures count; else those that have
    cost an interval of the store, and the last, of which that is not known yet.
    """
    if _start is None or (earlier := _start.earlier) is None:
        return expected_s
    seen = (earlier.failures if in_tier else earlier.stored) + ("why" in _start.failure)
    return (expected_s + time.time() - earlier.began) / (1 + seen)


def _sentence(why: str) -> str:
    """The first line of what is reported of a failure, with the error of a traceback that begins there."""
    lines = why.strip().splitlines() or [""]
    return lines[0].removesuffix(" Error on this rank:").replace("Traceback (most recent call last):", lines[-1])


def process_start(process: str) -> float:
    """Return when a process began, in unix seconds (Linux; elsewhere, when this module was imported)."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return _loaded
    return time.time() - age
