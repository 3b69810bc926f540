"""Computes the metrics of a run and its checkpoints from the records of its ranks.

:mod:`stagereg.sweep.metric` defines the named metrics. All attempts of a run count. A checkpoint takes as long as on
its slowest rank. Times of different ranks are compared only if the ranks share a machine and thus a clock.
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
_LEAST_UNDISTURBED = 3  # minimum number of undisturbed steps for the median time of a step
_TOUCHED_S = 1e-4  # maximum seconds of background work during an undisturbed step


@dataclass(frozen=True)
class Saved:
    """A checkpoint, with values over all ranks."""

    step: int  # training step
    start: float  # when the first rank started to save, seconds since the start of the run
    end: float  # last recorded time, seconds since the start of the run
    stall_s: float | None  # stall of the training loop on the slowest rank, seconds; `None` if not recorded
    stage_s: float | None  # staging time of the slowest rank, seconds
    write_s: float | None  # write time of the slowest rank, seconds
    nbytes: int  # bytes staged by all ranks
    written: int  # bytes of the files
    state: Literal["complete", "lost", "not complete"]  # lost: with `error`; not complete: the attempt ended first
    error: str = ""
    restart: int = 0  # number of the attempt, from 0


def saved(run: Run) -> list[Saved]:
    """Return the checkpoints of ``run`` in checkpoint storage by start time; a step saved twice appears twice."""
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
    """Return the spans of all ranks by step and by the number of earlier saves of the step on the rank."""
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
    """Compute the metrics of a run, which may have no records, and of the return value of its task.

    Named metrics are those of :data:`stagereg.sweep.metric.METRICS`. Others, in seconds and bytes: ``steps``;
    ``checkpoints`` (committed) and ``lost_checkpoints``; ``train_s``, from the end of the first step to the end of the
    last step with its stall, summed over attempts; ``lost_s``, the part lost to checkpoints; ``step_s``, the median
    undisturbed step (all three: maximum over ranks); ``state_bytes`` of a checkpoint over all ranks; ``write_s``, the
    median. ``returned`` is a loss or a dict of numbers, which become ``returned.KEY`` and may be NaN or infinite.
    """
    found = _returned(run, returned)
    if run is not None:
        found |= {**_of_checkpoints(run), **_of_training(run), **_of_ending(run)}
    return {name: float(value) for name, value in found.items()}


def _real(value: Any) -> float | None:
    """Return a number or a one-element tensor as a float; ``None`` if ``value`` is not a real number."""
    if value is None or isinstance(value, (bool, str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except Exception:  # types of other packages may raise any exception
        return None


def _returned(run: Run | None, returned: Any) -> dict[str, float]:
    """Return the task's values; without a loss, the last loss that rank 0 logged (NaN if not finite)."""
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
    parts: defaultdict[int, list[tuple[Run, RankRecord]]] = defaultdict(list)  # records of each rank, by attempt
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
    """Return a rank's training time over all attempts, its time lost to checkpoints, and an undisturbed step's time."""
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
        # Steps vary: in the sum, fast and slow steps cancel out, so that chance alone adds little.
        found["lost_s"] = stalls_s + max(0.0, sum(took - count * usual for took, count in disturbed))
    return found


def _trained_s(record: RankRecord) -> float:
    """Return the seconds from the first to the last step of an attempt, plus stalls after the last step."""
    if len(record.steps) < 2:
        return 0.0
    first, last = record.steps[0][1], record.steps[-1][1]
    return last - first + Covered(record.stalls).within(last, math.inf)


class Covered:
    """The union of spans of time."""

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
        """Return the covered seconds between ``began`` and ``ended``."""
        return self._until(ended) - self._until(began)

    def _until(self, moment: float) -> float:
        at = bisect.bisect_right(self._starts, moment) - 1
        return 0.0 if at < 0 else self._before[at] + min(moment, self._ends[at]) - self._starts[at]


def _samples(run: Run) -> dict[str, float]:
    """Return samples per second over all ranks, without the first step of each attempt."""
    logged = [each for each in run.attempts if any("samples" in log for one in each.ranks for _, _, log in one.logs)]
    # A join records its samples when it ends, so failed attempts are incomplete: only the last attempt counts.
    seconds = sum(max(map(_trained_s, each.ranks)) for each in logged or [run])
    joins = [record.join for record in run.ranks if record.join is not None and "samples" in record.join]
    if seconds <= 0 or not (logged or joins):
        return {}
    if logged:
        trained = [record for each in logged for record in each.ranks if record.steps]
        values = [log for record in trained for step, _, log in record.logs if step > record.steps[0][0]]
        return {"samples_per_s": sum(each.get("samples") or 0.0 for each in values) / seconds}
    # Assumes batches of equal size, to exclude the first step.
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
