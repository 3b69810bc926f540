"""What a reader should know before trusting the figures of a comparison: of a row, and of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stagereg.sweep.metric import Metric, counted
from stagereg.sweep.result import JobResult

if TYPE_CHECKING:
    from stagereg.sweep.comparison import ComparisonRow

__all__ = ["of", "of_row"]

_MACHINE = ("cpu", "cores", "device")
_OVERLAP_S = 1.0
"""Seconds that two jobs may run beside each other: one is ending while the next begins."""


def of_row(completed: Sequence[JobResult], ranking: Metric) -> Iterator[str]:
    """What is special about a row of these completed jobs."""
    without = sum(not job.has(ranking.name) for job in completed)
    if 0 < without < len(completed):
        yield f"no {ranking.name} in {without} of {len(completed)} runs"
    if lost := sum(int(job.figures.get("lost_checkpoints", 0)) for job in completed):
        yield f"{counted(lost, 'checkpoint')} could not be saved"
    if _counts_only_stalls(completed):
        yield "lost_percent counts only stalls, since staging and writing left no step undisturbed"


def of(jobs: Sequence[JobResult], rows: Sequence[ComparisonRow], ranking: Metric) -> Iterator[str]:
    """What keeps the rows from being compared as they stand."""
    mixed = list(dict.fromkeys(row.versions for row in rows if row.versions))
    if mixed:
        yield (
            f"Results of different versions are mixed ({'; '.join(mixed)}). Each has rows of its own: what differs "
            "between them may come from the version."
        )
    completed = [job for job in jobs if job.status == "completed"]
    machines = list(dict.fromkeys(_machine(job) for job in completed if "cpu" in job.environment))
    if len(machines) > 1:
        yield (
            f"The jobs ran on different machines ({'; '.join(machines[:3])}{' …' * (len(machines) > 3)}): what differs "
            "between rows may come from the machine."
        )
    if older := _older(jobs):
        was = "was" if older == 1 else "were"
        yield (
            f"{counted(older, 'job')} {was} over before the first one began: left, it may be, by an earlier sweep in "
            "the same directory."
        )
    if beside := _beside(jobs):
        yield f"Up to {beside} jobs ran at the same time on one machine, so they may have slowed each other down."
    if unfinished := sum(job.status == "unfinished" for job in jobs):
        was, their = ("was", "its") if unfinished == 1 else ("were", "their")
        yield (
            f"{counted(unfinished, 'job')} {was} killed half-way or {'is' if unfinished == 1 else 'are'} still "
            f"running: {their} figures do not count."
        )
    measured = [row for row in rows if row.cells]
    without = [row for row in measured if ranking.name not in row.cells]
    if 0 < len(without) < len(measured):
        yield f"No run of {_listed([row.label for row in without])} has {ranking.name}."
    if ranking.name == "lost_percent":
        partly = [row for row in measured if _counts_only_stalls(row.jobs)]
        if 0 < len(partly) < len(measured):
            yield (
                f"The lost_percent of {_listed([row.label for row in partly])} counts only stalls, since no step was "
                "undisturbed: it may be larger than it looks."
            )


def _counts_only_stalls(jobs: Sequence[JobResult]) -> bool:
    return any(job.status == "completed" and job.has("lost_percent") and not job.has("step_s") for job in jobs)


def _machine(job: JobResult) -> str:
    known = {name: str(job.environment[name]) for name in _MACHINE if job.environment.get(name)}
    return ", ".join(f"{value} cores" if name == "cores" else value for name, value in known.items())


def _older(jobs: Sequence[JobResult]) -> int:
    """How many jobs had ended when the one with the lowest number began."""
    numbered = [job for job in jobs if isinstance(job.job.get("num"), int) and job.started > 0]
    first = min(numbered, key=lambda job: job.job["num"], default=None)
    return sum(first is not None and job.started + job.seconds < first.started for job in numbered)


def _beside(jobs: Sequence[JobResult]) -> int:
    """The most jobs that ran at the same time on one host; 0 if they took turns."""
    most = 0
    for host in {str(job.environment["host"]) for job in jobs if job.environment.get("host")}:
        here = [job for job in jobs if job.environment.get("host") == host and job.seconds > 2 * _OVERLAP_S]
        edges = sorted(
            edge for job in here for edge in ((job.started, 1), (job.started + job.seconds - _OVERLAP_S, -1))
        )
        running = 0
        for _, change in edges:
            running += change
            most = max(most, running)
    return most if most > 1 else 0


def _listed(labels: Sequence[str]) -> str:
    shown, more = labels[:3], len(labels) - 3
    return "; ".join(shown) + (f" and {more} more" if more > 0 else "")
