"""Runs and sweeps as programs leave them, written by tests: every time and size is chosen, so the figures are known.

The default run of :class:`Sample`, on each rank: 40 steps of 10 ms, of which the 10th, 20th, 30th and 40th are
saved. A save holds the loop for 2 ms, staging goes on for 5 ms from its start, writing for 20 ms after that, and
each step that staging or writing overlaps takes 1 ms longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stagereg.sweep.cell import Cell
from stagereg.sweep.comparison import Comparison, ComparisonRow
from stagereg.sweep.metric import METRICS, metric
from stagereg.sweep.result import JobResult

BEGAN = 1_750_000_000.0
MIB = 2**20
VERSIONS = {"stagereg": "0.1.0", "torch": "2.13.0", "hydra-core": "1.3.8", "python": "3.11.9"}
CONSTANT = ("train.steps=40", "nproc=2")
"""Overrides that all jobs of a sweep share."""
ENVIRONMENT = {**VERSIONS, "cpu": "a processor", "cores": 2, "load": [0.1, 0.1, 0.1], "host": "here"}


@dataclass(frozen=True)
class Sample:
    """The times and sizes of a run, in seconds and bytes; see :func:`write_run`."""

    ranks: int = 2
    steps: int = 40
    every: int = 10
    step_s: float = 0.010
    stall_s: float = 0.002
    stage_s: float = 0.005
    write_s: float = 0.020
    slower_s: float = 0.001
    nbytes: int = 64 * MIB
    samples: int = 8
    shadowed: int = 3
    peak_rss: int = 512 * MIB
    loss: float = 2.5
    began: float = BEGAN
    host: str = "here"
    versions: Mapping[str, str] = field(default_factory=lambda: VERSIONS)
    killed: bool = False
    """Whether the ranks end in the middle of their last line."""

    def events(self, rank: int) -> Iterator[dict[str, Any]]:
        """What the rank records, in order of time; each rank stalls for 0.1 ms longer than the one before."""
        t = self.began
        process = {"rank": rank, "world_size": self.ranks, "pid": 100 + rank, "host": self.host}
        yield {"event": "start", "t": t, "format": 1, "time": "2026-11-21T10:00:00+0000", **process, **self.versions}
        stall = self.stall_s + 1e-4 * rank
        busy_until = t
        late: list[dict[str, Any]] = []
        for step in range(1, self.steps + 1):
            overlapped = busy_until - t > 1e-6
            t += self.step_s + (self.slower_s if overlapped else 0.0)
            ready = [event for event in late if event["t"] <= t]
            late = [event for event in late if event["t"] > t]
            yield from ready
            yield {"event": "step", "t": t, "step": step}
            values = {"loss": self.loss + (self.steps - step) / self.steps, "samples": self.samples}
            yield {"event": "log", "t": t, "step": step, "values": values}
            if step % self.every == 0:
                staged, written = t + self.stage_s, t + self.stage_s + self.write_s
                yield {"event": "stall", "t": t + stall, "step": step, "start": t, "seconds": stall}
                size = {"step": step, "bytes": self.nbytes}
                late.append({"event": "stage", "t": staged, **size, "start": t, "seconds": self.stage_s})
                late.append({"event": "write", "t": written, **size, "start": staged, "seconds": self.write_s})
                t, busy_until = t + stall, written
        if self.killed:
            return
        yield from late
        t = max(t, busy_until)
        shadowed = self.shadowed if rank else 0
        yield {"event": "join", "t": t, "steps": self.steps - shadowed, "shadowed": shadowed}
        ended = {"seconds": t - self.began, "status": "completed", "peak_rss": self.peak_rss}
        yield {"event": "end", "t": t, **ended}


def write_events(path: Path, events: Sequence[Mapping[str, Any]], torn: str = "") -> None:
    """Add lines to the file of a rank, and at its end a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
        file.write(torn)


def rank_file(directory: Path, rank: int) -> Path:
    return directory / (f"metrics.rank{rank}.jsonl" if rank else "metrics.jsonl")


def write_run(directory: Path, sample: Sample | None = None) -> Path:
    """Write the files of a run as its ranks would, and return its directory."""
    sample = sample or Sample()
    for rank in range(sample.ranks):
        torn = '{"event":"step","t":17500000' if sample.killed else ""
        write_events(rank_file(directory, rank), list(sample.events(rank)), torn)
    return directory


def write_hydra(directory: Path, overrides: Sequence[str], num: int | None = None, config: str = "seed: 1\n") -> Path:
    """Write what Hydra leaves in the directory of a job before the job begins."""
    folder = directory / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides) or "[]\n")
    (folder / "config.yaml").write_text(config)
    number = "???" if num is None else num
    (folder / "hydra.yaml").write_text(f"hydra:\n  job:\n    name: train\n    num: {number}\n    id: ${{x:y}}\n")
    return directory


def result(directory: Path, num: int = 0, **fields: Any) -> JobResult:
    """A completed job with no figures, by default."""
    given: dict[str, Any] = {
        "status": "completed",
        "job": {"num": num, "id": str(num), "name": "train"},
        "started": BEGAN + 60 * num,
        "seconds": 50.0,
        "versions": dict(VERSIONS),
        "environment": dict(ENVIRONMENT),
        "command": " ".join(["python train.py", *fields.get("overrides", ())]),
    }
    return JobResult(directory=directory, **given | fields)


def failed(directory: Path, num: int, overrides: Sequence[str], **fields: Any) -> JobResult:
    """A job that has raised."""
    error = "rank 1: RuntimeError: the loss is not finite\nTraceback (most recent call last):\n  ..."
    return result(directory, num, status="failed", error=error, overrides=tuple(overrides), **fields)


def row_of(
    parameters: Mapping[str, str],
    values: Mapping[str, Sequence[float]],
    verdicts: Mapping[str, str] | None = None,
    *,
    error: str = "",
    again: bool = False,
    directory: Path = Path("sweep/0"),
) -> ComparisonRow:
    """A row of as many jobs as the longest of ``values`` has, or of one that failed."""
    found = verdicts or {}
    cells = {name: replace(Cell.of(list(many)), verdict=found.get(name, "")) for name, many in values.items()}
    overrides = tuple(f"{name}={value}" for name, value in parameters.items())
    job = result(directory, status="failed" if error else "completed", error=error or None, overrides=overrides)
    repeats = range(max(map(len, values.values()), default=1))
    several = tuple(replace(job, repeat=repeat) for repeat in repeats)
    return ComparisonRow(dict(parameters), several, cells, again=again, error=error)


def compared(rows: Sequence[ComparisonRow], ranking: str = "stall_ms", warnings: Sequence[str] = ()) -> Comparison:
    """The rows side by side, in that order; columns are the figures that any has."""
    return Comparison(
        directory=Path("sweep"),
        parameters=tuple(dict.fromkeys(name for row in rows for name in row.parameters)),
        constant=("train.steps=60",),
        metrics=tuple(one for one in METRICS if any(one.name in row.cells for row in rows)),
        rows=tuple(rows),
        repeats=max(len(row.jobs) for row in rows),
        ranking=metric(ranking),
        matters=0.05,
        equal={},
        undecided=frozenset(),
        warnings=tuple(warnings),
    )


def jobs(
    figures: Mapping[str, Sequence[Mapping[str, float]]],
    directory: Path = Path("sweep"),
    again: Sequence[Mapping[str, float]] = (),
    **fields: Any,
) -> list[JobResult]:
    """The completed jobs of a sweep, repeats in turns, as results in memory.

    ``figures`` are those of each repeat, by combination as one would type it; ``again`` those of the A/A row.
    """
    planned: list[tuple[str, int, bool, Mapping[str, float]]] = []
    for repeat in range(max(map(len, figures.values()), default=0)):
        planned += [(name, repeat, False, each[repeat]) for name, each in figures.items() if repeat < len(each)]
    planned += [(next(iter(figures)), repeat, True, each) for repeat, each in enumerate(again)]
    every = []
    for num, (name, repeat, is_again, seen) in enumerate(planned):
        about = {"overrides": (*CONSTANT, *name.split()), "repeat": repeat, "again": is_again, **fields}
        every.append(result(directory / str(num), num, figures=dict(seen), **about))
    return every


STALLS = {
    "stager=blocking join.mode=planned": 31.0,
    "stager=blocking join.mode=counted": 31.5,
    "stager=pinned_cached join.mode=planned": 3.0,
    "stager=pinned_cached join.mode=counted": 3.05,
    "stager=overlapped join.mode=planned": 9.0,
    "stager=overlapped join.mode=counted": 9.1,
}
"""The combinations of :func:`sweep` and their median stall in ms; the two best tie."""
FAILING = "stager=missing join.mode=planned"
UNFINISHED = "stager=missing join.mode=counted"


def figures(stall_ms: float) -> dict[str, float]:
    """Figures of a run whose checkpoints stalled for that long."""
    rate = 1600 - 4 * stall_ms
    return {"stall_ms": stall_ms, "samples_per_s": rate, "loss": 2.5, "shadowed_steps": 3.0, "checkpoints": 4.0}


def sweep(directory: Path, stalls: Mapping[str, float] = STALLS, repeats: int = 4, others: bool = True) -> Path:
    """Write a sweep to disk as its jobs would, and return its directory.

    Stalls are medians; repeats differ by 0.1 ms. With ``others``, there are A/A jobs, a combination of which each job
    failed, and one whose job was killed half-way and left no result.
    """
    around = [(at - (repeats - 1) / 2) * 0.1 for at in range(repeats)]
    planned = {name: [figures(stall + each) for each in around] for name, stall in stalls.items()}
    again = [figures(next(iter(stalls.values())) + 0.05 + each) for each in around] if others else []
    every = jobs(planned, directory, again)
    num = len(every)
    if others:
        overrides = (*CONSTANT, *FAILING.split())
        every += [failed(directory / str(num + at), num + at, overrides, repeat=at) for at in range(repeats)]
    for job in every:
        marks = [f"++sweep.repeat={job.repeat}", f"++sweep.again={job.again}"]
        write_hydra(job.directory, [*job.overrides, *marks], job.job["num"])
        job.write()
    if others:
        last = directory / str(len(every))
        write_hydra(last, [*CONSTANT, *UNFINISHED.split(), "++sweep.repeat=0"], len(every))
        write_run(last, Sample(killed=True, began=BEGAN + 60 * len(every)))
    (directory / "multirun.yaml").write_text("hydra: {}\n")
    return directory
