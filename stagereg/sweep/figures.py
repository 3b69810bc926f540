"""The figures of one run, from what its ranks have recorded.

Each figure is there if it is known, and finite; the metrics among them are defined with their names, in
:mod:`stagereg.sweep.metric`. A checkpoint takes as long as its slowest rank. Times of different ranks are compared
only where they are of one machine, and so of one clock.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagereg.sweep.checkpoints import by_checkpoint
from stagereg.sweep.metric import RETURNED
from stagereg.sweep.run import RankRecord, Run, Span

__all__ = ["figures", "number"]

_GIB = 2**30
_LEAST_UNDISTURBED = 3
"""Undisturbed steps whose median is taken as the time of a step, at least."""
_TOUCHED_S = 1e-4
"""Seconds of work in the background that a step may have beside it and still counts as undisturbed."""


def figures(run: Run | None, returned: Any = None) -> dict[str, float]:
    """Compute what is known of a run.

    The metrics have the names of :data:`stagereg.sweep.metric.METRICS`; besides, in seconds and bytes: ``steps``;
    ``checkpoints`` (committed) and ``lost_checkpoints``; ``train_s``, from the end of the first step to the end of the
    last with its stall, ``lost_s`` of it and ``step_s``, the median undisturbed step, each of the rank that has most;
    ``stall_s``, the slowest rank's stalls in sum; ``bytes_staged``, in all, and ``state_bytes``, of one checkpoint on
    all ranks; ``write_s``, the median.

    Args:
        run: what was recorded; ``None`` where nothing was.
        returned: what the task returned: its loss, or a dict of numbers, which become ``returned.KEY``.
    """
    found = _returned(run, returned)
    if run is not None:
        found |= {**_checkpoints(run), **_training(run), **_ending(run)}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def number(value: Any) -> float | None:
    """The finite real number that ``value`` is, also as a tensor of one element; ``None`` if it is none."""
    real = _real(value)
    return real if real is not None and math.isfinite(real) else None


def _real(value: Any) -> float | None:
    """The number that a value is, if not a finite one."""
    if value is None or isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except Exception:  # whatever a type of somebody else raises
        return None


def _returned(run: Run | None, returned: Any) -> dict[str, float]:
    """What the task has returned, or if that has no loss, not even NaN, the loss that rank 0 has logged last."""
    by_name = returned if isinstance(returned, Mapping) else {"loss": returned}
    logged = [
        values["loss"]
        for record in (run.ranks if run is not None else ())
        if record.rank == 0
        for _, _, values in record.logs
        if "loss" in values
    ]
    found = {f"{RETURNED}{key}": _real(value) for key, value in by_name.items() if key != "loss"}
    own = _real(by_name.get("loss"))
    found["loss"] = logged[-1] if own is None and logged else own
    return {name: value for name, value in found.items() if value is not None}


def _checkpoints(run: Run) -> dict[str, float]:
    stalls = by_checkpoint(record.stalls for record in run.ranks).values()
    stages = by_checkpoint(record.stages for record in run.ranks).values()
    writes = by_checkpoint(record.writes for record in run.ranks).values()
    found: dict[str, float] = {}
    if stalls:
        found["stall_ms"] = 1e3 * statistics.median(map(_slowest, stalls))
        found["stall_s"] = sum(map(_slowest, stalls))
    if staged := [_nbytes(spans) for spans in stages if _nbytes(spans)]:
        found |= {"bytes_staged": sum(staged), "state_bytes": statistics.median(staged)}
    if writes:
        found["write_s"] = statistics.median(map(_slowest, writes))
    for name, checkpoints in (("staged_gib_per_s", stages), ("write_gib_per_s", writes)):
        if rates := [
            _nbytes(spans) / _GIB / _slowest(spans) for spans in checkpoints if _nbytes(spans) and _slowest(spans)
        ]:
            found[name] = statistics.median(rates)
    if stalls or writes:
        found["checkpoints"] = len(writes)
    if lost := max(len(record.lost) for record in run.ranks):
        found["lost_checkpoints"] = lost
    return found


def _slowest(spans: Iterable[Span]) -> float:
    return max(span.seconds for span in spans)


def _nbytes(spans: Iterable[Span]) -> int:
    return sum(span.nbytes for span in spans)


class _Covered:
    """Spans of time laid over one another."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for span in sorted(spans, key=lambda span: span.start):
            if self._ends and span.start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], span.end)
            else:
                self._starts.append(span.start)
                self._ends.append(span.end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._before = list(itertools.accumulate(lengths, initial=0.0))

    def within(self, began: float, ended: float) -> float:
        """Seconds of the time from ``began`` to ``ended`` that are covered."""
        return self._until(ended) - self._until(began)

    def _until(self, moment: float) -> float:
        at = bisect.bisect_right(self._starts, moment) - 1
        return 0.0 if at < 0 else self._before[at] + min(moment, self._ends[at]) - self._starts[at]


@dataclass(frozen=True)
class _Training:
    """A rank's time from its first step to its last: seconds in all, lost to checkpoints, of an undisturbed step."""

    seconds: float
    lost: float
    step: float | None


def _training(run: Run) -> dict[str, float]:
    if not (most := max(len(record.steps) for record in run.ranks)):
        return {}
    found: dict[str, float] = {"steps": most}
    ranks = [_of_rank(record, _background(run, record)) for record in run.ranks if len(record.steps) > 1]
    ranks = [rank for rank in ranks if rank.seconds > 0]
    if not ranks:
        return found
    found["train_s"] = max(rank.seconds for rank in ranks)
    if any(record.stalls for record in run.ranks):
        found["lost_s"] = max(rank.lost for rank in ranks)
        found["lost_percent"] = 100 * max(rank.lost / rank.seconds for rank in ranks)
    if steps := [rank.step for rank in ranks if rank.step is not None]:
        found["step_s"] = max(steps)
    if (samples := _samples(run)) is not None:
        found["samples_per_s"] = samples / found["train_s"]
    return found


def _background(run: Run, record: RankRecord) -> Iterator[Span]:
    """Staging and writing on the machine of a rank."""
    host = record.start.get("host")
    for other in run.ranks:
        if other is record or (host is not None and other.start.get("host") == host):
            yield from other.stages
            yield from other.writes


def _of_rank(record: RankRecord, background: Iterable[Span]) -> _Training:
    first, last = record.steps[0][1], record.steps[-1][1]
    held = _Covered(record.stalls)
    busy = _Covered([*record.stalls, *background])
    # The save of the last step comes after it, and is training time too.
    held_after = held.within(last, math.inf)
    undisturbed: list[float] = []
    disturbed: list[tuple[float, int]] = []
    for (step, began), (following, ended) in itertools.pairwise(record.steps):
        count = max(1, following - step)
        stalled = held.within(began, ended)
        took = ended - began - stalled
        if busy.within(began, ended) - stalled > _TOUCHED_S:
            disturbed.append((took, count))
        else:
            undisturbed.append(took / count)
    lost = held.within(first, last) + held_after
    usual = statistics.median(undisturbed) if len(undisturbed) >= _LEAST_UNDISTURBED else None
    if usual is not None:
        # Steps vary: the sum lets the quick ones make up for the slow ones, so that chance alone adds little.
        lost += max(0.0, sum(took - count * usual for took, count in disturbed))
    return _Training(last - first + held_after, lost, usual)


def _samples(run: Run) -> float | None:
    """Samples seen on all ranks in the steps after the first, which is where training time begins."""
    if any("samples" in values for record in run.ranks for _, _, values in record.logs):
        return sum(
            values.get("samples") or 0.0
            for record in run.ranks
            if record.steps
            for step, _, values in record.logs
            if step > record.steps[0][0]
        )
    joins = [record.join for record in run.ranks if record.join is not None]
    if not any("samples" in join for join in joins):
        return None
    # All batches are taken to be of one size, to leave out the first.
    return sum(join.get("samples", 0) * (1 - 1 / join["steps"]) for join in joins if join.get("steps"))


def _ending(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    peaks = [number(record.end.get("peak_rss")) for record in run.ranks if record.end is not None]
    if len(peaks) == run.world_size and None not in peaks:
        found["peak_host_gib"] = sum(peak for peak in peaks if peak is not None) / _GIB
    if any(record.join is not None for record in run.ranks):
        found["shadowed_steps"] = sum((record.join or {}).get("shadowed", 0) for record in run.ranks)
    return found
