"""What a reader should know before trusting the figures of a comparison: of a row, and of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stagereg.sweep.metric import Metric, counted
from stagereg.sweep.result import JobResult

if TYPE_CHECKING:
    from stagereg.sweep.comparison import ComparisonRow

__all__ = ["of", "of_row"]

_OVERLAP_S = 1.0
"""Seconds that two jobs may run beside each other: one is ending while the next begins."""
_NAMED = 3


def of_row(completed: Sequence[JobResult], ranking: Metric) -> Iterator[str]:
    """What is special about a row of these completed jobs."""
    without = sum(not job.has(ranking.name) for job in completed)
    if 0 < without < len(completed):
        yield f"no {ranking.name} in {without} of {len(completed)} runs"
    if lost := sum(int(job.figures.get("lost_checkpoints", 0)) for job in completed):
        yield f"{counted(lost, 'checkpoint')} could not be saved"
    if any(map(_counts_only_stalls, completed)):
        yield "lost_percent counts only stalls, since staging and writing left no step undisturbed"


def of(jobs: Sequence[JobResult], rows: Sequence[ComparisonRow], ranking: Metric) -> Iterator[str]:
    """What keeps the rows from being compared as they stand."""
    if mixed := {row.versions for row in rows if row.versions}:
        yield (
            f"Results of different versions are mixed ({_listed(mixed)}). Each has rows of its own: what differs "
            "between them may come from the version."
        )
    machines = {_machine(job) for job in jobs if job.status == "completed" and "cpu" in job.environment}
    if len(machines) > 1:
        yield f"The jobs ran on different machines ({_listed(machines)}): what differs may come from the machine."
    if older := _older(jobs):
        yield f"Over before the first job began: {counted(older, 'job')}, left, it may be, by an earlier sweep here."
    if (beside := _beside(jobs)) > 1:
        yield f"Up to {beside} jobs ran at the same time on one machine, so they may have slowed each other down."
    if unfinished := sum(job.status == "unfinished" for job in jobs):
        yield f"Killed half-way or still running: {counted(unfinished, 'job')}, whose figures do not count."
    measured = [row for row in rows if row.cells]
    without = [row.label for row in measured if ranking.name not in row.cells]
    if 0 < len(without) < len(measured):
        yield f"No run of {_listed(without)} has {ranking.name}."
    partly = [row.label for row in measured if any(map(_counts_only_stalls, row.jobs))]
    if ranking.name == "lost_percent" and 0 < len(partly) < len(measured):
        yield (
            f"The lost_percent of {_listed(partly)} counts only stalls, since no step was undisturbed: it may be "
            "larger than it looks."
        )


def _counts_only_stalls(job: JobResult) -> bool:
    return job.status == "completed" and job.has("lost_percent") and not job.has("step_s")


def _machine(job: JobResult) -> str:
    cores = f"{job.environment.get('cores', 'unknown')} cores"
    return ", ".join(filter(None, (str(job.environment["cpu"]), cores, str(job.environment.get("device") or ""))))


def _older(jobs: Sequence[JobResult]) -> int:
    """How many jobs had ended when the one with the lowest number began."""
    numbered = [job for job in jobs if isinstance(job.job.get("num"), int) and job.started > 0]
    first = min(numbered, key=lambda job: job.job["num"], default=None)
    return sum(first is not None and job.started + job.seconds < first.started for job in numbered)


def _beside(jobs: Sequence[JobResult]) -> int:
    """The most jobs that ran at the same time on one host."""
    long = [job for job in jobs if job.seconds > 2 * _OVERLAP_S and job.environment.get("host")]
    most = 0
    for one in long:  # most run at a time when one of them begins
        others = [job for job in long if job.environment["host"] == one.environment["host"]]
        running = [job for job in others if job.started <= one.started < job.started + job.seconds - _OVERLAP_S]
        most = max(most, len(running))
    return most


def _listed(names: set[str] | Sequence[str]) -> str:
    every = sorted(names) if isinstance(names, set) else list(names)
    more = len(every) - _NAMED
    return "; ".join(every[:_NAMED]) + (f" and {more} more" if more > 0 else "")
