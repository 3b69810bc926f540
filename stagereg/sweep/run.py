"""One run as its ranks have recorded it: the lines of :mod:`stagereg.base.record`, read back into plain records.

A damaged line is left out and counted; the torn last one of a killed process is not counted. A rank without an ``end``
was killed or is running. If several programs have recorded in one directory, the run is the one that began last.
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
_MOST = float(1 << 63)  # of bytes, steps and seconds
_MOST_RANKS = 1 << 24
_decoded = json.JSONDecoder(parse_constant=lambda name: None).decode


@dataclass(frozen=True)
class Span:
    """Something that took time on a rank."""

    step: int  # the training step that it belongs to
    start: float  # when it began, in seconds as by `stagereg.base.record.now`
    seconds: float  # how long it took
    nbytes: int = 0  # bytes that it moved; 0 where none were recorded
    near: bool = False  # whether it is of a save that went to the tier alone

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Started:
    """How an attempt came to its first step, as rank 0 has reported it."""

    step: int  # the first that was taken
    since: float  # when the one before it was taken, or the run began
    phases: dict[str, float]  # seconds from there, by `stagereg.extensions.goodput.phases.PHASES`
    number: int = 0  # of the restart
    why: str = ""  # the failure before it; empty if there was none
    source: str = ""  # the checkpoint that it went on from; empty for none
    origin: str = ""  # the kind of it: "tier", "store", or "survivors"
    again: int = 0  # steps that had been taken before
    restored: int = 0  # the step that it resumed from; 0 for none
    checkpoints: str = ""  # the directory that the run saves to

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded. All times are seconds since the epoch, on the clock of the rank's machine."""

    rank: int  # the rank
    start: dict[str, Any] = field(default_factory=dict)  # world size, host and versions, recorded when it began
    steps: tuple[tuple[int, float], ...] = ()  # (step, when it had ended); of `stagereg.log` if there are no others
    stalls: tuple[Span, ...] = ()  # how long each save held the training loop
    stages: tuple[Span, ...] = ()  # of each copy, with this rank's bytes of tensor data
    writes: tuple[Span, ...] = ()  # from all ranks having staged to the commit, with the bytes of this rank's files
    lost: tuple[tuple[int, str], ...] = ()  # (step, error) of each save to the store that failed
    tier_writes: tuple[Span, ...] = ()  # as ``writes``, to the tier
    transfers: tuple[Span, ...] = ()  # copies of steps of the tier to other machines
    fallbacks: tuple[tuple[int, int, str], ...] = ()  # (step, steps lost, why) of restores that skipped a checkpoint
    # ranks that the others waited for, on rank 0: (rank, machine, since or until which step, whether it is slow, how
    # many seconds of a step they wait, seconds of a step)
    stragglers: tuple[tuple[int, str, int, bool, float, float], ...] = ()
    logs: tuple[tuple[int, float, dict[str, float | None]], ...] = ()  # (step, when, values); `None`: not finite
    join: dict[str, float] | None = None  # steps with data, steps shadowed, samples seen; summed over the joins left
    end: dict[str, Any] | None = None  # seconds, status, error, peak memory; `None` if killed or still running
    started: Started | None = None  # on rank 0, once it took a step
    resumed: tuple[int, str, float] | None = None  # the step that it resumed from, the directory of checkpoints, when
    damaged: int = 0  # lines that could not be read, a torn last one aside
    first: float = 0.0  # when it recorded something first
    last: float = 0.0  # when it recorded something last
    attempt: str = ""  # the name of the attempt, as `stagereg.base.record.attempt_of` makes it; empty if there is none


@dataclass(frozen=True)
class Run:
    """One run: the records of its ranks, and their directory. The properties describe its last attempt."""

    directory: Path  # the run's output directory
    ranks: tuple[RankRecord, ...]  # the records there are, sorted by rank
    earlier: tuple[Run, ...] = ()  # its earlier attempts since one completed
    others: int = 0  # other runs that have recorded in the directory

    @classmethod
    def read(cls, directory: Path | str) -> Run:
        """Read the files of a run, which may still be growing."""
        directory = Path(directory)
        found = {int(named[1] or 0): path for path in directory.glob(FILES) if (named := _NAME.fullmatch(path.name))}
        if not found:
            raise ConfigError(
                f"{directory} holds no run: there is no metrics.jsonl in it. Programs under stagereg.main write one "
                "into their output directory."
            )
        try:
            recordings = [_recordings(rank, path) for rank, path in sorted(found.items())]
        except OSError as error:
            raise ConfigError(f"{directory} cannot be read: {error}") from error
        every = [each for several in recordings for each in several]
        if not every:
            raise ConfigError(f"{directory} holds no run: what is in {found[min(found)]} is not of stagereg.")
        last = [each for each in every if each.rank == every[0].rank][-1]
        attempts = _of_one_run(recordings[0]) if last.rank == 0 else (last,)
        others = {run_of(each.attempt) for each in every} - {run_of(each.attempt) for each in attempts}
        names = [record.attempt for record in attempts]
        later = (names[at:].count(name) - 1 for at, name in enumerate(names))
        *earlier, run = (cls(directory, _of_attempt(*each, recordings)) for each in zip(attempts, later, strict=True))
        return replace(run, earlier=tuple(earlier), others=len(others))

    @property
    def attempts(self) -> tuple[Run, ...]:
        """All attempts, in order; the last one is this."""
        return (*self.earlier, self)

    @property
    def world_size(self) -> int:
        """How many ranks the run had, by its own account or by the files there are."""
        return max(record.start.get("world_size", record.rank + 1) for record in self.ranks)

    @cached_property
    def began(self) -> float:
        """When the first of its ranks began, in seconds since the epoch."""
        return min(record.first for record in self.ranks)

    @property
    def seconds(self) -> float:
        return max(record.last for record in self.ranks) - self.began

    @property
    def status(self) -> str:
        """``"completed"``, ``"failed"`` (some rank has) or ``"unfinished"`` (killed, preempted, or running)."""
        ends = {record.end["status"] for record in self.ranks if record.end is not None}
        if ends - {"completed", "preempted"}:
            return "failed"
        finished = len(self.ranks) == self.world_size and all(record.end is not None for record in self.ranks)
        return "completed" if finished and "preempted" not in ends else "unfinished"

    @property
    def error(self) -> str:
        """The error of the rank that failed first, with the rank; empty if none has."""
        failed = [record for record in self.ranks if record.end and record.end["status"] != "completed"]
        first = min(failed, key=lambda record: record.last, default=None)
        return f"rank {first.rank}: {first.end.get('error') or 'it failed'}" if first and first.end else ""

    @property
    def versions(self) -> dict[str, str]:
        """As far as they were recorded by rank 0, or the first rank there is."""
        return self._texts("stagereg", "torch", "hydra-core", "python")

    @property
    def environment(self) -> dict[str, str]:
        return self._texts("host", "device")

    def _texts(self, *names: str) -> dict[str, str]:
        start = self.ranks[0].start
        return {name: start[name] for name in names if isinstance(start.get(name), str)}

    @property
    def damaged(self) -> int:
        """How many lines of all ranks and attempts could not be read, torn last ones aside."""
        return sum(record.damaged for each in self.attempts for record in each.ranks)


def _of_one_run(recordings: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
    """Return the attempts of the run that the last one belongs to, as ``extensions.goodput.earlier`` finds them."""
    run, saves_to = run_of(recordings[-1].attempt), _saves_to(recordings[-1])
    own = [each for each in recordings if run_of(each.attempt) == run or (saves_to and _saves_to(each) == saves_to)]
    ends = [(record.end or {}).get("status") == "completed" for record in own[:-1]]
    first = max((at + 1 for at, completed in enumerate(ends) if completed), default=0)
    return tuple(own[first:])


def _of_attempt(record: RankRecord, later: int, recordings: Sequence[Sequence[RankRecord]]) -> tuple[RankRecord, ...]:
    """Return the records of an attempt, one of each rank; ``later`` attempts of the run have the same name."""
    named = [[each for each in several if each.attempt == record.attempt] for several in recordings]
    # Files of ranks beyond its size are of another attempt in the same directory.
    size = record.start.get("world_size", math.inf) if record.rank == 0 else math.inf
    own = (several[-1 - later] for several in named if len(several) > later)
    return tuple(each for each in own if each.rank < size)


def _saves_to(record: RankRecord) -> str:
    return "" if record.started is None else record.started.checkpoints


@dataclass
class _Lines:
    """The lines of one attempt in a file."""

    attempt: str
    events: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    times: list[float] = field(default_factory=list)
    damaged: int = 0


def _recordings(rank: int, path: Path) -> list[RankRecord]:
    """Return the attempts in a file, in the order in which they began; none if no line in it is of one."""
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
                found[-1].damaged += line.endswith(b"\n")  # not a torn last one
            continue
        if value is None:  # an event of an unknown name is of a later version or not ours
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
        steps=tuple(next(same) for _, same in itertools.groupby(steps, key=lambda each: each[0])),  # repeats left out
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
            f"{path} was written by a newer stagereg ({event.get('stagereg', 'unknown')}, format {wanted}); this one "
            f"reads formats up to {FORMAT}. Update stagereg to read it."
        )


# -- how each event is read: whatever is raised here means a damaged line; more fields are left to later versions


def _number(event: Mapping[str, Any], name: str, most: float = _MOST) -> float:
    """Return a number of an event; sums and ratios of some with no bound are not numbers."""
    value = event[name]
    if isinstance(value, (bool, str)) or not abs(value) <= most:
        raise ValueError(name)
    return float(value)


def _whole(event: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    return int(_number(event, name)) if name in event else otherwise


def _text(event: Mapping[str, Any], name: str) -> str:
    """Return a text of an event; empty if it has none."""
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
    "lost": lambda event: (_step(event), _text(event, "error"), "dir" in event),  # of the tier with a ``dir``
    **dict.fromkeys(("begin", "restart"), _started),
    "resumed": lambda event: (_step(event), _text(event, "dir"), float(event["t"])),
    "straggler": _straggler,
    "fallback": lambda event: (_step(event), _whole(event, "lost"), _text(event, "why")),
    "join": lambda event: {name: _number(event, name) for name in _JOINED if event.get(name) is not None},
    "log": _log,
    "end": _end,
}
