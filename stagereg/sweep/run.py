"""One run as its ranks have recorded it: the lines of :mod:`stagereg.record`, read back into records of plain values.

A torn last line, of a killed process, is left out; a damaged line elsewhere is left out and counted. A rank without an
``end`` was killed or is running. If several programs have recorded in one directory, the run is the one that began
last, with its earlier attempts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stagereg.errors import ConfigError
from stagereg.record import FILES, FORMAT, run_of

_NAME = re.compile(r"metrics(?:\.rank(\d+))?\.jsonl")
_JOINED = ("steps", "shadowed", "samples")
_decoded = json.JSONDecoder(parse_constant=lambda name: None).decode


@dataclass(frozen=True)
class Span:
    """Something that took time on a rank."""

    step: int  # the training step that it belongs to
    start: float  # when it began, in seconds as by `stagereg.record.now`
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
    phases: dict[str, float]  # seconds from there, by `stagereg.launch.phases.PHASES`
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
    # (step, when it had ended) for each training step; of `stagereg.log` where no checkpointer recorded steps
    steps: tuple[tuple[int, float], ...] = ()
    stalls: tuple[Span, ...] = ()  # how long each save held the training loop
    # from the beginning of each copy until it was complete, with this rank's bytes of tensor data
    stages: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()  # from all ranks having staged to the commit, with the bytes of this rank's files
    lost: tuple[tuple[int, str], ...] = ()  # (step, error) of each save to the store that failed
    tier_writes: tuple[Span, ...] = ()  # as ``writes``, to the tier
    transfers: tuple[Span, ...] = ()  # copies of steps of the tier to other machines
    # (step, steps lost, why) of each restore that passed over a newer checkpoint which was damaged
    fallbacks: tuple[tuple[int, int, str], ...] = ()
    # ranks that the others waited for, on rank 0: (rank, machine, since or until which step, whether it is slow, how
    # many seconds of a step they wait, seconds of a step)
    stragglers: tuple[tuple[int, str, int, bool, float, float], ...] = ()
    # (step, when, values) of each `stagereg.log`; `None` stands for NaN or infinity
    logs: tuple[tuple[int, float, dict[str, float | None]], ...] = ()
    # steps taken with data, steps shadowed, samples seen; summed over the joins that were left
    join: dict[str, float] | None = None
    # seconds, status, error, peak memory; `None` for a rank that was killed or is still running
    end: dict[str, Any] | None = None
    started: Started | None = None  # on rank 0, once it took a step
    resumed: tuple[int, str, float] | None = None  # the step that it resumed from, the directory of checkpoints, when
    damaged: int = 0  # lines that could not be read, a torn last one aside
    first: float = 0.0  # when it recorded something first
    last: float = 0.0  # when it recorded something last
    attempt: str = ""  # the name of the attempt, as `stagereg.record.attempt_of` makes it; empty if there is none


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
        runs = []
        for at, record in enumerate(attempts):
            later = sum(each.attempt == record.attempt for each in attempts[at + 1 :])
            runs.append(cls(directory, _of_attempt(record, later, recordings)))
        return replace(runs[-1], earlier=tuple(runs[:-1]), others=len(others))

    @property
    def attempts(self) -> tuple[Run, ...]:
        """All attempts, in order; the last one is this."""
        return (*self.earlier, self)

    @property
    def world_size(self) -> int:
        """How many ranks the run had, by its own account or by the files there are."""
        return max(int(record.start.get("world_size", record.rank + 1)) for record in self.ranks)

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
        ends = [(record.end, record) for record in self.ranks if record.end is not None]
        failed = [(record.last, record.rank, end) for end, record in ends if end["status"] != "completed"]
        if not failed:
            return ""
        _, rank, end = min(failed, key=lambda each: each[:2])
        return f"rank {rank}: {end.get('error') or 'it failed'}"

    @property
    def versions(self) -> dict[str, str]:
        """Of stagereg, torch, hydra-core and python, as far as they were recorded."""
        return self._texts("stagereg", "torch", "hydra-core", "python")

    @property
    def environment(self) -> dict[str, str]:
        """What rank 0, or the first there is, recorded of its machine: ``host`` and, where it has one, ``device``."""
        return self._texts("host", "device")

    def _texts(self, *names: str) -> dict[str, str]:
        start = self.ranks[0].start
        return {name: start[name] for name in names if isinstance(start.get(name), str)}

    @property
    def damaged(self) -> int:
        """How many lines of all ranks and attempts could not be read, torn last ones aside."""
        return sum(record.damaged for each in self.attempts for record in each.ranks)


def _of_one_run(recordings: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
    """Return the attempts of the run that the last one belongs to, as :mod:`stagereg.launch.earlier` finds them."""
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
    times: list[float] = field(default_factory=list)  # the first and the last one
    damaged: int = 0


def _recordings(rank: int, path: Path) -> list[RankRecord]:
    """Return the attempts in a file, in the order in which they began; none if no line in it is of one."""
    found: list[_Lines] = []
    latest: dict[str, _Lines] = {}
    *lines, torn = path.read_bytes().split(b"\n")
    for at, line in enumerate([*lines, torn]):
        if not line.strip():
            continue
        try:
            event = _decoded(line.decode())
            name, t = str(event["event"]), _number(event, "t")
            value = _READ[name](event) if name in _READ else None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            if found:
                found[-1].damaged += at < len(lines)
            continue
        if value is None:  # an event of an unknown name is of a later version or not ours
            continue
        attempt = str(event.get("run", ""))
        if name == "start":
            _check_format(event, path)
        if name == "start" or attempt not in latest:
            latest[attempt] = _Lines(attempt)
            found.append(latest[attempt])
        own = latest[attempt]
        own.events[name].append(value)
        own.times = [min(t, *own.times), max(t, *own.times)] if own.times else [t, t]
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
        first=times[0],
        last=times[1],
    )


def _check_format(event: Mapping[str, Any], path: Path) -> None:
    wanted = event.get("format", FORMAT)
    if isinstance(wanted, int) and wanted > FORMAT:
        raise ConfigError(
            f"{path} was written by a newer stagereg ({event.get('stagereg', 'unknown')}, format {wanted}); this one "
            f"reads formats up to {FORMAT}. Update stagereg to read it."
        )


# -- how each event is read: whatever is raised here means a damaged line


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event[name]
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise ValueError(name)
    return float(value)


def _step(event: Mapping[str, Any]) -> int:
    return int(_number(event, "step"))


def _span(event: Mapping[str, Any]) -> Span:
    nbytes = int(_number(event, "bytes")) if "bytes" in event else 0
    seconds = max(0.0, _number(event, "seconds"))
    return Span(_step(event), _number(event, "start"), seconds, nbytes, event.get("tier") is True)


def _started(event: Mapping[str, Any]) -> Started:
    phases = {str(name): _number(event["phases"], name) for name in event["phases"]}
    number, again = (int(event.get(name, 0)) for name in ("number", "again"))
    restored = int(event.get("restored", _step(event) - 1))
    why, source, origin, checkpoints = (str(event.get(name, "")) for name in ("why", "source", "origin", "dir"))
    since = _number(event, "since")
    return Started(_step(event), since, phases, number, why, source, origin, again, restored, checkpoints)


def _straggler(event: Mapping[str, Any]) -> tuple[int, str, int, bool, float, float]:
    who = int(_number(event, "rank")), str(event["machine"])
    return *who, _step(event), event["slow"] is True, _number(event, "wait"), _number(event, "of")


def _log(event: Mapping[str, Any]) -> tuple[int, float, dict[str, float | None]]:
    values = event["values"]
    numbers = {name: None if value is None else _number(values, name) for name, value in values.items()}
    return _step(event), event["t"], numbers


def _start(event: Mapping[str, Any]) -> Mapping[str, Any]:
    if event.get("world_size", 1) < 1:
        raise ValueError(event)
    return event


_READ: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "start": _start,
    "step": lambda event: (_step(event), float(event["t"])),
    "stall": _span,
    "stage": _span,
    "write": _span,
    "lost": lambda event: (_step(event), str(event.get("error", "")), "dir" in event),  # of the tier with a ``dir``
    "tier": _span,
    "copy": _span,
    "begin": _started,
    "restart": _started,
    "resumed": lambda event: (_step(event), str(event.get("dir", "")), float(event["t"])),
    "straggler": _straggler,
    "fallback": lambda event: (_step(event), int(_number(event, "lost")), str(event.get("why", ""))),
    "join": lambda event: {name: _number(event, name) for name in _JOINED if event.get(name) is not None},
    "log": _log,
    "end": lambda event: {**event, "status": str(event["status"])},
}
"""Whatever an event has besides is left to later versions."""
