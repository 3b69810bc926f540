"""Reads the records of a run: the files ``metrics.jsonl`` that its ranks write with :mod:`stagereg.base.record`.

A corrupt line is skipped and counted, except a truncated last line, which a killed process may leave. A rank without
the event ``end`` was killed or is still running. If a directory has records of several runs, the latest run is read.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stagereg.base.record import FILES, FORMAT, run_of
from stagereg.errors import MALFORMED, ConfigError
from stagereg.sweep.files import LATEST_TIME, lines_of

_NAME = re.compile(r"metrics(?:\.rank([0-9]{1,8}))?\.jsonl")
_JOINED = ("steps", "shadowed", "samples")
_MOST = float(1 << 63)  # maximum for bytes, steps and seconds
_MOST_RANKS = 1 << 24
_decoded = json.JSONDecoder(parse_constant=lambda name: None).decode


@dataclass(frozen=True)
class Span:
    """The time span of an operation on a rank, for example of staging."""

    step: int  # training step
    start: float  # start in seconds since the epoch, see `stagereg.base.record.now`
    seconds: float  # duration
    nbytes: int = 0  # bytes copied or written; 0 if not recorded
    near: bool = False  # whether the save was only to the local tier

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Started:
    """The period from the start of an attempt to its first step, as recorded by rank 0."""

    step: int  # first step of the attempt
    since: float  # time of the last step of the previous attempt, or of the start of the run
    phases: dict[str, float]  # seconds in each phase of `stagereg.extensions.goodput.phases.PHASES`
    number: int = 0  # number of the restart
    why: str = ""  # the failure that ended the previous attempt; empty if none is known
    source: str = ""  # checkpoint from which the attempt resumed; empty if it started from scratch
    origin: str = ""  # where the source was: "tier", "store", or "survivors" (an emergency save)
    again: int = 0  # number of steps that the attempt had to repeat
    restored: int = 0  # step from which the attempt resumed; 0 if it started from scratch
    checkpoints: str = ""  # checkpoint directory of the run

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class RankRecord:
    """The records of one rank in one attempt. Times are seconds since the epoch, by the clock of the rank's machine."""

    rank: int
    start: dict[str, Any] = field(default_factory=dict)  # world size, host and versions
    steps: tuple[tuple[int, float], ...] = ()  # (step, end time) of each step
    stalls: tuple[Span, ...] = ()  # when the training loop waited for a save
    stages: tuple[Span, ...] = ()  # when the state was copied, with the bytes of this rank's tensors
    writes: tuple[Span, ...] = ()  # from the end of staging on all ranks to the commit, with bytes of this rank's files
    lost: tuple[tuple[int, str], ...] = ()  # (step, error) of failed saves to checkpoint storage
    tier_writes: tuple[Span, ...] = ()  # writes to the local tier
    transfers: tuple[Span, ...] = ()  # copies from the local tier to other machines
    fallbacks: tuple[tuple[int, int, str], ...] = ()  # (step, repeated steps, reason) of restores that skipped a step
    # Changes in slow ranks, recorded on rank 0: (rank, machine, first or last slow step, whether the rank is now slow,
    # seconds per step for which the other ranks wait, seconds per step).
    stragglers: tuple[tuple[int, str, int, bool, float, float], ...] = ()
    logs: tuple[tuple[int, float, dict[str, float | None]], ...] = ()  # (step, time, values); `None`: not finite
    join: dict[str, float] | None = None  # totals of completed joins: steps with data, steps without data, samples
    end: dict[str, Any] | None = None  # seconds, status, error, peak memory; `None` if killed or still running
    started: Started | None = None  # only on rank 0, after the first step
    resumed: tuple[int, str, float] | None = None  # (step, checkpoint directory, time) of the restore
    damaged: int = 0  # number of corrupt lines, without a truncated last line
    first: float = 0.0  # time of the first record
    last: float = 0.0  # time of the last record
    attempt: str = ""  # name of the attempt, see `stagereg.base.record.attempt_of`; empty if not recorded


@dataclass(frozen=True)
class Run:
    """The records of all ranks of a run. Most properties describe the last attempt."""

    directory: Path  # output directory of the run
    ranks: tuple[RankRecord, ...]  # records of the last attempt, sorted by rank
    earlier: tuple[Run, ...] = ()  # earlier attempts, but only those after the last completed one
    others: int = 0  # number of other runs that have records in the directory

    @classmethod
    def read(cls, directory: Path | str) -> Run:
        """Read the records of a run, even while it is running."""
        directory = Path(directory)
        found = {int(named[1] or 0): path for path in directory.glob(FILES) if (named := _NAME.fullmatch(path.name))}
        if not found:
            raise ConfigError(
                f"{directory} contains no run: metrics.jsonl is missing. Programs under stagereg.main write this file "
                "to their output directory."
            )
        try:
            recordings = [_recordings(rank, path) for rank, path in sorted(found.items())]
        except OSError as error:
            raise ConfigError(f"cannot read {directory}: {error}") from error
        every = [each for several in recordings for each in several]
        if not every:
            raise ConfigError(f"{directory} contains no run: {found[min(found)]} has no records of stagereg.")
        last = [each for each in every if each.rank == every[0].rank][-1]
        attempts = _of_one_run(recordings[0]) if last.rank == 0 else (last,)
        others = {run_of(each.attempt) for each in every} - {run_of(each.attempt) for each in attempts}
        names = [record.attempt for record in attempts]
        later = (names[at:].count(name) - 1 for at, name in enumerate(names))
        *earlier, run = (cls(directory, _of_attempt(*each, recordings)) for each in zip(attempts, later, strict=True))
        return replace(run, earlier=tuple(earlier), others=len(others))

    @property
    def attempts(self) -> tuple[Run, ...]:
        """All attempts in order. The last one is this object."""
        return (*self.earlier, self)

    @property
    def world_size(self) -> int:
        """The world size, as recorded, or else derived from the highest rank with records."""
        return max(record.start.get("world_size", record.rank + 1) for record in self.ranks)

    @cached_property
    def began(self) -> float:
        """When the first rank started, in seconds since the epoch."""
        return min(record.first for record in self.ranks)

    @property
    def seconds(self) -> float:
        return max(record.last for record in self.ranks) - self.began

    @property
    def status(self) -> str:
        """The status: "completed", "failed" (a rank failed), or "unfinished" (killed, preempted, or still running)."""
        ends = {record.end["status"] for record in self.ranks if record.end is not None}
        if ends - {"completed", "preempted"}:
            return "failed"
        finished = len(self.ranks) == self.world_size and all(record.end is not None for record in self.ranks)
        return "completed" if finished and "preempted" not in ends else "unfinished"

    @property
    def error(self) -> str:
        """The number and error of the rank that failed first; empty if no rank failed."""
        failed = [record for record in self.ranks if record.end and record.end["status"] != "completed"]
        first = min(failed, key=lambda record: record.last, default=None)
        return f"rank {first.rank}: {first.end.get('error') or 'failed'}" if first and first.end else ""

    @property
    def versions(self) -> dict[str, str]:
        """The versions of stagereg, torch, hydra-core and python, as recorded by the first rank with records."""
        return self._texts("stagereg", "torch", "hydra-core", "python")

    @property
    def environment(self) -> dict[str, str]:
        return self._texts("host", "device")

    def _texts(self, *names: str) -> dict[str, str]:
        start = self.ranks[0].start
        return {name: start[name] for name in names if isinstance(start.get(name), str)}

    @property
    def damaged(self) -> int:
        """The number of corrupt lines of all ranks and attempts, not counting truncated last lines."""
        return sum(record.damaged for each in self.attempts for record in each.ranks)


def _of_one_run(recordings: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
    """Return the attempts of the latest run after its last completed one. ``extensions.goodput`` has the same rule."""
    run, saves_to = run_of(recordings[-1].attempt), _saves_to(recordings[-1])
    own = [each for each in recordings if run_of(each.attempt) == run or (saves_to and _saves_to(each) == saves_to)]
    ends = [(record.end or {}).get("status") == "completed" for record in own[:-1]]
    first = max((at + 1 for at, completed in enumerate(ends) if completed), default=0)
    return tuple(own[first:])


def _of_attempt(record: RankRecord, later: int, recordings: Sequence[Sequence[RankRecord]]) -> tuple[RankRecord, ...]:
    """Return the records of an attempt, one per rank. ``later``: the number of later attempts with the same name."""
    named = [[each for each in several if each.attempt == record.attempt] for several in recordings]
    # Files of ranks >= the world size belong to a different attempt in the same directory.
    size = record.start.get("world_size", math.inf) if record.rank == 0 else math.inf
    own = (several[-1 - later] for several in named if len(several) > later)
    return tuple(each for each in own if each.rank < size)


def _saves_to(record: RankRecord) -> str:
    return "" if record.started is None else record.started.checkpoints


@dataclass
class _Lines:
    """The events of one attempt in the file of a rank."""

    attempt: str
    events: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    times: list[float] = field(default_factory=list)
    damaged: int = 0


def _recordings(rank: int, path: Path) -> list[RankRecord]:
    """Return the records of each attempt in the file of a rank, in order of start time."""
    found: list[_Lines] = []
    latest: dict[str, _Lines] = {}
    for line in lines_of(path):
        if not line.strip():
            continue
        try:
            event = _decoded(line.decode())
            name, t = event["event"], _number(event, "t", LATEST_TIME)
            value = _READ[name](event) if name in _READ else None
            attempt = _text(event, "run")
        except MALFORMED:
            if found:
                found[-1].damaged += line.endswith(b"\n")  # Without a line break, it is a truncated last line.
            continue
        if value is None:  # The event is unknown: a later version or a different program wrote it.
            continue
        if name == "start":
            _check_format(value, path)
        if name == "start" or attempt not in latest:
            latest[attempt] = _Lines(attempt)
            found.append(latest[attempt])
        own = latest[attempt]
        own.events[name].append(value)
        own.times.append(t)
    return [_record(rank, each) for each in found]


def _record(rank: int, lines: _Lines) -> RankRecord:
    events, times = lines.events, lines.times
    joins, steps = events["join"], events["step"] or [(step, t) for step, t, _ in events["log"]]
    return RankRecord(
        rank=rank,
        attempt=lines.attempt,
        start=events["start"][-1] if events["start"] else {},
        steps=tuple(next(same) for _, same in itertools.groupby(steps, key=lambda each: each[0])),  # drops duplicates
        stalls=tuple(events["stall"]),
        stages=tuple(events["stage"]),
        writes=tuple(events["write"]),
        lost=tuple((step, error) for step, error, near in events["lost"] if not near),
        tier_writes=tuple(events["tier"]),
        transfers=tuple(events["copy"]),
        fallbacks=tuple(events["fallback"]),
        stragglers=tuple(events["straggler"]),
        logs=tuple(events["log"]),
        join={name: sum(join.get(name, 0) for join in joins) for name in set().union(*joins)} if joins else None,
        end=events["end"][-1] if events["end"] else None,
        started=next(iter(events["restart"] or events["begin"]), None),
        resumed=next((each for each in events["resumed"] if not steps or each[2] <= steps[0][1]), None),
        damaged=lines.damaged,
        first=min(times),
        last=max(times),
    )


def _check_format(event: Mapping[str, Any], path: Path) -> None:
    if (wanted := event.get("format", FORMAT)) > FORMAT:
        raise ConfigError(
            f"{path} was written by a newer stagereg ({event.get('stagereg', 'unknown')}): format {wanted}, but this "
            f"version reads formats up to {FORMAT}. Update stagereg."
        )


# -- Parsers of events. If a parser raises any exception, the line is corrupt. Parsers ignore unknown fields.


def _number(event: Mapping[str, Any], name: str, most: float = _MOST) -> float:
    """Return the numeric field ``name`` of an event. Raises ``ValueError`` if its magnitude exceeds ``most``."""
    value = event[name]
    if isinstance(value, (bool, str)) or not abs(value) <= most:
        raise ValueError(name)
    return float(value)


def _whole(event: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    return int(_number(event, name)) if name in event else otherwise


def _text(event: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := event.get(name) or "", str):
        raise TypeError(name)
    return value


def _step(event: Mapping[str, Any]) -> int:
    return int(_number(event, "step"))


def _span(event: Mapping[str, Any]) -> Span:
    seconds = max(0.0, _number(event, "seconds"))
    return Span(_step(event), _number(event, "start"), seconds, _whole(event, "bytes"), event.get("tier") is True)


def _started(event: Mapping[str, Any]) -> Started:
    phases = {str(name): _number(event["phases"], name) for name in event["phases"]}
    number, again = _whole(event, "number"), _whole(event, "again")
    restored = _whole(event, "restored", _step(event) - 1)
    why, source, origin, checkpoints = (_text(event, name) for name in ("why", "source", "origin", "dir"))
    since = _number(event, "since")
    return Started(_step(event), since, phases, number, why, source, origin, again, restored, checkpoints)


def _straggler(event: Mapping[str, Any]) -> tuple[int, str, int, bool, float, float]:
    rank, waits = int(_number(event, "rank")), (_number(event, "wait"), _number(event, "of"))
    return rank, _text(event, "machine"), _step(event), event["slow"] is True, *waits


def _log(event: Mapping[str, Any]) -> tuple[int, float, dict[str, float | None]]:
    values = event["values"]
    most = sys.float_info.max
    numbers = {name: None if value is None else _number(values, name, most) for name, value in values.items()}
    return _step(event), event["t"], numbers


def _start(event: Mapping[str, Any]) -> Mapping[str, Any]:
    numbers = {name: _whole(event, name) for name in ("world_size", "format") if name in event}
    if not 1 <= numbers.get("world_size", 1) <= _MOST_RANKS:
        raise ValueError("world_size")
    return {name: value for name, value in event.items() if isinstance(value, str)} | numbers


def _end(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _text(event, "status"):
        raise ValueError("status")
    return {**event, "error": _text(event, "error")}


_READ: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "start": _start,
    "step": lambda event: (_step(event), float(event["t"])),
    **dict.fromkeys(("stall", "stage", "write", "tier", "copy"), _span),
    "lost": lambda event: (_step(event), _text(event, "error"), "dir" in event),  # Only events of the tier have `dir`.
    **dict.fromkeys(("begin", "restart"), _started),
    "resumed": lambda event: (_step(event), _text(event, "dir"), float(event["t"])),
    "straggler": _straggler,
    "fallback": lambda event: (_step(event), _whole(event, "lost"), _text(event, "why")),
    "join": lambda event: {name: _number(event, name) for name in _JOINED if event.get(name) is not None},
    "log": _log,
    "end": _end,
}
