"""Computes the metrics of a run and its checkpoints from the records of its ranks.

:mod:`stagereg.sweep.metric` defines the named metrics. All attempts of a run count, including those that failed. The
time of a checkpoint is that of the slowest rank. Clock times of ranks are compared only if they share a machine.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stagereg.sweep.metric import RETURNED
from stagereg.sweep.run import RankRecord, Run, Span

_GIB = 2**30
_LEAST_UNDISTURBED = 3  # minimum number of steps without checkpoint work for the median time of a step
_TOUCHED_S = 1e-4  # a step with more seconds of checkpoint work counts as disturbed


@dataclass(frozen=True)
class Saved:
    """A checkpoint, with times and bytes over all ranks."""

    step: int  # training step
    start: float  # when the first rank started to save, in seconds since the start of the run
    end: float  # when the last rank finished, in seconds since the start of the run
    stall_s: float | None  # seconds for which the training loop of the slowest rank waited; `None` if not recorded
    stage_s: float | None  # seconds of staging on the slowest rank
    write_s: float | None  # seconds of writing on the slowest rank
    nbytes: int  # bytes staged by all ranks
    written: int  # bytes of the files of all ranks
    state: Literal["complete", "lost", "not complete"]  # "lost": failed; "not complete": the attempt ended first
    error: str = ""  # why the save failed
    restart: int = 0  # number of the attempt, from 0


def saved(run: Run) -> list[Saved]:
    """Return the saves of ``run`` to checkpoint storage, in order of start time, including repeated saves of a step."""
    began = run.attempts[0].began
    return [one for number, each in enumerate(run.attempts) for one in _saved(each, number, began)]


def _saved(run: Run, number: int, began: float) -> list[Saved]:
    stalls = _by_checkpoint([span for span in rank.stalls if not span.near] for rank in run.ranks)
    stages = _by_checkpoint([span for span in rank.stages if not span.near] for rank in run.ranks)
    writes = _by_checkpoint(rank.writes for rank in run.ranks)
    errors = {(step, 0): error for rank in run.ranks for step, error in rank.lost}
    every = []
    for key in {*stalls, *stages, *writes, *errors}:
        spans = stalls[key] + stages[key] + writes[key]
        every.append(
            Saved(
                step=key[0],
                start=min((span.start for span in spans), default=run.began) - began,
                end=max((span.end for span in spans), default=run.began) - began,
                stall_s=_longest(stalls[key]),
                stage_s=_longest(stages[key]),
                write_s=_longest(writes[key]),
                nbytes=sum(span.nbytes for span in stages[key]),
                written=sum(span.nbytes for span in writes[key]),
                state="complete" if writes[key] else "lost" if key in errors else "not complete",
                error="" if writes[key] else errors.get(key, ""),
                restart=number,
            )
        )
    return sorted(every, key=lambda one: (one.start, one.step))


def _by_checkpoint(ranks: Iterable[Iterable[Span]]) -> defaultdict[tuple[int, int], list[Span]]:
    """Group the spans of all ranks by save: the step, and the number of earlier saves of this step on the rank."""
    groups: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
    for spans in ranks:
        seen: Counter[int] = Counter()
        for span in spans:
            groups[span.step, seen[span.step]].append(span)
            seen[span.step] += 1
    return groups


def _longest(spans: list[Span]) -> float | None:
    return max((span.seconds for span in spans), default=None)


def figures(run: Run | None, returned: Any = None) -> dict[str, float]:
    """Return the metrics of a run by name. ``run``: ``None`` if there are no records of ranks.

    The result contains the metrics of :data:`stagereg.sweep.metric.METRICS` and these: ``steps``; ``checkpoints``
    (committed) and ``lost_checkpoints`` (failed); ``train_s``, seconds from the end of the first step to the end of the
    last step and its save, summed over attempts; ``lost_s``, the part of ``train_s`` lost to checkpoints; ``step_s``,
    the median step without checkpoint work; ``state_bytes``, the size of a checkpoint; ``write_s``, the median write.
    ``train_s``, ``lost_s`` and ``step_s`` are those of the slowest rank. ``returned``: the return value of the task, a
    loss or a dict of numbers; a number under ``KEY`` becomes ``returned.KEY``, and may be NaN or infinite.
    """
    found = _returned(run, returned)
    if run is not None:
        found |= {**_of_checkpoints(run), **_of_training(run), **_of_ending(run)}
    return {name: float(value) for name, value in found.items()}


def _real(value: Any) -> float | None:
    """Convert a number or a one-element tensor to float. Return ``None`` if ``value`` is not a real number."""
    if value is None or isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except Exception:  # float() of a type from another package may raise any exception
        return None


def _returned(run: Run | None, returned: Any) -> dict[str, float]:
    """Return the numbers that the task returned. Without a loss among them, add the last loss that rank 0 logged."""
    by_name = returned if isinstance(returned, Mapping) else {"loss": returned}
    first = [record for each in (run.attempts if run else ()) for record in each.ranks if record.rank == 0]
    logged = [values["loss"] for record in first for _, _, values in record.logs if "loss" in values]
    found = {f"{RETURNED}{key}": _real(value) for key, value in by_name.items() if key != "loss"}
    own = _real(by_name.get("loss"))
    if own is None and logged:
        own = math.nan if logged[-1] is None else logged[-1]
    found["loss"] = own
    return {name: value for name, value in found.items() if value is not None}


def _of_checkpoints(run: Run) -> dict[str, float]:
    every = saved(run)
    medians: dict[str, Sequence[float]] = {
        "stall_ms": [1e3 * one.stall_s for one in every if one.stall_s is not None],
        "state_bytes": [one.nbytes for one in every if one.nbytes],
        "write_s": [one.write_s for one in every if one.write_s is not None],
        "staged_gib_per_s": [one.nbytes / _GIB / one.stage_s for one in every if one.nbytes and one.stage_s],
        "write_gib_per_s": [one.written / _GIB / one.write_s for one in every if one.written and one.write_s],
    }
    found: dict[str, float] = {name: statistics.median(values) for name, values in medians.items() if values}
    if {"stall_ms", "write_s"} & found.keys():
        found["checkpoints"] = len(medians["write_s"])
    if lost := sum(max(len(record.lost) for record in each.ranks) for each in run.attempts):
        found["lost_checkpoints"] = lost
    return found


def _of_training(run: Run) -> dict[str, float]:
    parts: defaultdict[int, list[tuple[Run, RankRecord]]] = defaultdict(list)  # by rank: (attempt, record of the rank)
    for each in run.attempts:
        for record in each.ranks:
            parts[record.rank].append((each, record))
    if not (most := max(len({step for _, record in own for step, _ in record.steps}) for own in parts.values())):
        return {}
    found: dict[str, float] = {"steps": most}
    ranks = [rank for own in parts.values() if (rank := _of_rank(own))["train_s"] > 0]
    if not ranks:
        return found
    saves = any(record.stalls for own in parts.values() for _, record in own)
    for name in ("train_s", "step_s", *(["lost_s"] if saves else [])):
        if all(name in rank for rank in ranks):
            found[name] = max(rank[name] for rank in ranks)
    if "lost_s" in found:
        found["lost_percent"] = 100 * max(rank["lost_s"] / rank["train_s"] for rank in ranks)
    return found | _samples(run)


def _of_rank(parts: Sequence[tuple[Run, RankRecord]]) -> dict[str, float]:
    """Return ``train_s``, ``lost_s`` and ``step_s`` of one rank. ``parts``: each attempt with the rank's record."""
    undisturbed: list[float] = []
    disturbed: list[tuple[float, int]] = []
    stalls_s = 0.0
    for run, record in parts:
        host = record.start.get("host")
        same = [each for each in run.ranks if each is record or (host is not None and each.start.get("host") == host)]
        work = [span for each in same for span in (*each.stages, *each.writes, *each.tier_writes, *each.transfers)]
        held, busy = Covered(record.stalls), Covered([*record.stalls, *work])
        for (step, began), (following, ended) in itertools.pairwise(record.steps):
            count = max(1, following - step)
            stalled = held.within(began, ended)
            took = ended - began - stalled
            if busy.within(began, ended) - stalled > _TOUCHED_S:
                disturbed.append((took, count))
            else:
                undisturbed.append(took / count)
        if len(record.steps) > 1:
            stalls_s += held.within(record.steps[0][1], math.inf)
    found = {"train_s": sum(_trained_s(record) for _, record in parts)}
    if len(undisturbed) >= _LEAST_UNDISTURBED:
        usual = found["step_s"] = statistics.median(undisturbed)
        # Sum before max(): the times of steps vary, and fast and slow steps cancel each other out in the sum.
        found["lost_s"] = stalls_s + max(0.0, sum(took - count * usual for took, count in disturbed))
    return found


def _trained_s(record: RankRecord) -> float:
    """Return the seconds from the end of the first step of an attempt to the end of the last step and its stalls."""
    if len(record.steps) < 2:
        return 0.0
    first, last = record.steps[0][1], record.steps[-1][1]
    return last - first + Covered(record.stalls).within(last, math.inf)


class Covered:
    """The union of possibly overlapping spans of time."""

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
        """Return how many seconds between ``began`` and ``ended`` at least one span covers."""
        return self._until(ended) - self._until(began)

    def _until(self, moment: float) -> float:
        at = bisect.bisect_right(self._starts, moment) - 1
        return 0.0 if at < 0 else self._before[at] + min(moment, self._ends[at]) - self._starts[at]


def _samples(run: Run) -> dict[str, float]:
    """Return the metric samples per second over all ranks, without the first step of each attempt."""
    logged = [each for each in run.attempts if any("samples" in log for one in each.ranks for _, _, log in one.logs)]
    # A join records samples only at its end, so failed attempts lack samples. Count only joins of the last attempt.
    seconds = sum(max(map(_trained_s, each.ranks)) for each in logged or [run])
    joins = [record.join for record in run.ranks if record.join is not None and "samples" in record.join]
    if seconds <= 0 or not (logged or joins):
        return {}
    if logged:
        trained = [record for each in logged for record in each.ranks if record.steps]
        values = [log for record in trained for step, _, log in record.logs if step > record.steps[0][0]]
        return {"samples_per_s": sum(each.get("samples") or 0.0 for each in values) / seconds}
    # To exclude the first step, assume that all batches have the same size.
    samples = sum(join["samples"] * (1 - 1 / join["steps"]) for join in joins if join.get("steps"))
    return {"samples_per_s": samples / seconds}


def _of_ending(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    sums = []
    for each in run.attempts:
        peaks = [peak for record in each.ranks if (peak := _real((record.end or {}).get("peak_rss"))) is not None]
        sums += [sum(peaks)] if len(peaks) == each.world_size and math.isfinite(sum(peaks)) else []
    if sums:
        found["peak_host_gib"] = max(sums) / _GIB
    if joins := [record.join for each in run.attempts for record in each.ranks if record.join is not None]:
        found["shadowed_steps"] = sum(join.get("shadowed", 0) for join in joins)
    return found
