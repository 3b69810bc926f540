"""The steps of a run in its tier, from what its ranks have recorded: where the copies are, and how long they took.

As for checkpoints, a step takes as long as its slowest rank; of one that was saved twice the last save counts. A step
that the run before wrote is copied again when it is restored; so a step can have copies here and no writing.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stagereg.sweep.run import Run, Span


@dataclass(frozen=True)
class NearSaved:
    """One step of all ranks in the tier."""

    step: int  # the training step
    start: float  # when the first rank began to write or copy it, seconds since the start of the run
    stall_s: float | None  # how long the slowest rank's training stood still, where it went to the tier alone
    write_s: float | None  # how long the slowest rank's writing took; `None` for one of the run before
    copy_s: float | None  # how long the slowest rank sent, from its first transfer to the end of its last
    nbytes: int  # written by all ranks, on their own machines
    machines: tuple[str, ...]  # that have acknowledged a copy of some part
    # `"copied"`: each part has a copy on another machine; `"written"`: not all have; `"lost"`, with `error`
    state: Literal["copied", "written", "lost"]
    error: str = ""  # the first, of the save or of a copy that was not made


def near_saved(run: Run) -> list[NearSaved]:
    """Return the steps of ``run`` in its tier, in the order in which they were begun."""
    stalls = _by_step([span for span in rank.stalls if span.near] for rank in run.ranks)
    writes = _by_step(rank.tier_writes for rank in run.ranks)
    transferred = {each.span.step for rank in run.ranks for each in rank.transfers}
    errors = {step: error for rank in reversed(run.ranks) for step, error in reversed(rank.tier_lost)}
    every = []
    for step in {*writes, *transferred, *errors}:
        by_rank = [[each for each in rank.transfers if each.span.step == step] for rank in run.ranks]
        sent = list(itertools.chain.from_iterable(by_rank))
        copied = {each.part for each in sent if not each.error}
        failed = next((f"{each.machine}: {each.error}" for each in sent if each.error), "")
        parts = run.world_size if writes[step] else len({each.part for each in sent})
        spans = [*writes[step], *(each.span for each in sent)]
        is_lost = step in errors and not spans
        every.append(
            NearSaved(
                step=step,
                start=min((span.start for span in spans), default=run.began) - run.began,
                stall_s=max((span.seconds for span in stalls[step]), default=None),
                write_s=max((span.seconds for span in writes[step]), default=None),
                copy_s=max((_seconds([each.span for each in several]) for several in by_rank if several), default=None),
                nbytes=sum(span.nbytes for span in writes[step]),
                machines=tuple(sorted({each.machine for each in sent if not each.error})),
                state="lost" if is_lost else "copied" if len(copied) >= parts else "written",
                error=errors.get(step, failed) if is_lost or len(copied) < parts else "",
            )
        )
    return sorted(every, key=lambda one: (one.start, one.step))


def sources(run: Run) -> tuple[int, dict[str, int]] | None:
    """Return from which step of the tier a run went on, and the bytes by machine, most first; ``None`` if from none."""
    found = [each for rank in run.ranks for each in rank.restored[-1:]]
    if not found:
        return None
    total = sum((Counter(by_machine) for _, by_machine in found), Counter[str]())
    return found[0][0], dict(total.most_common())


def _by_step(ranks: Iterable[Iterable[Span]]) -> defaultdict[int, list[Span]]:
    """Return what each rank has recorded of a step, the last if there are several."""
    groups: defaultdict[int, list[Span]] = defaultdict(list)
    for spans in ranks:
        for step, span in {span.step: span for span in spans}.items():
            groups[step].append(span)
    return groups


def _seconds(spans: list[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans)
