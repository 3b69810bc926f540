"""Whether hundreds of checkpoints leave anything behind: ``make bench-endurance``.

A small model is trained and saved after every step, with retention at work all the time. At ten marks the process waits
for its last save, collects garbage, and counts what it and its children hold and what lies on the disk. :func:`grown`
compares the marks. The exit code is 1 if something has grown. Needs Linux's ``/proc``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import stagereg.base.output as output
import stagereg.base.shutdown as shutdown
from stagereg.bench.command import folder_below
from stagereg.bench.measure import quiet
from stagereg.registry import build

MARKS = 10  # how often one looks
Mark = dict[str, float]
"""What was held after so many saves, all of them committed; see :data:`HEADS`."""

HEADS = {
    "saves": "saves",
    "seconds": "ms a save",  # and the training step before it, on average since the mark before
    "memory": "memory MiB",  # resident, of the process and its children; what they share counts for each
    "objects": "objects",  # that Python's garbage collector knows of, in the process itself
    "descriptors": "fds",  # of the process and its children
    "threads": "threads",  # likewise
    "processes": "processes",
    "disk": "disk MiB",  # all files below the directory of checkpoints
    "names": "names",  # of files, directories and links there
}
"""The counts by name, and what each is called in the table."""

_UNITS = {"seconds": 1e-3, "memory": 2**20, "disk": 2**20}
_WIDTH, _LAYERS, _BATCH = 64, 12, 8
_SLACK = 1 / 50
_MEMORY_SLACK_BYTES = 4 << 20
_OBJECTS_SLACK = 100
_PROC = Path("/proc")


def endure(stager: str, storage: str, saves: int, keep: int, folder: Path) -> list[Mark]:
    """Train, save after each step into an empty directory, and look around at each of the marks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(_BATCH, _WIDTH)
    marks: list[Mark] = []
    with quiet():
        parts = {"stager": build("stager", stager), "storage": build("storage", storage)}
        with build("checkpoint", "default", dir=str(folder), every=1, keep=keep, **parts) as checkpointer:
            done = 0
            for number in range(1, MARKS + 1):
                output.progress(f"endurance: mark {number} of {MARKS}")
                until, started = saves * number // MARKS, time.perf_counter()
                for step in range(done + 1, until + 1):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    checkpointer.save(step, {"model": model, "optimizer": optimizer, "step": step})
                checkpointer.wait()
                shutdown.finish()  # old checkpoints are deleted too
                seconds = (time.perf_counter() - started) / (until - done)
                done = until
                marks.append({"saves": done, "seconds": seconds, **_counts(folder)})
    output.progress()
    return marks


def grown(marks: Sequence[Mark]) -> list[str]:
    """Return what has grown from the first mark to the last, a line each; nothing is as it should be.

    By the first mark, a tenth of the saves, everything is there that is kept: both copies of the stager, the plans, the
    thread, and as many checkpoints as stay. The time of a save depends on the machine, and is not judged; memory is, by
    the medians of the first and the last three marks.
    """
    first, last = dict(marks[0]), dict(marks[-1])
    first["memory"], last["memory"] = (
        statistics.median(mark["memory"] for mark in some) for some in (marks[:3], marks[-3:])
    )
    slack = {
        **dict.fromkeys(("descriptors", "threads", "processes", "names"), 0.0),
        "disk": first["disk"] * _SLACK,  # numbers in pickles have more digits later
        "memory": _MEMORY_SLACK_BYTES,  # it comes and goes by pages; 12 KiB left by each of 500 saves are more
        # One with every save is what Checkpointer.stats keeps of it, and caches fill slowly.
        "objects": last["saves"] - first["saves"] + _OBJECTS_SLACK,
    }
    return [
        f"{name}: {_cell(name, first[name])} at first, {_cell(name, last[name])} later"
        for name, more in slack.items()
        if last[name] > first[name] + more
    ]


def show(title: str, marks: Sequence[Mark]) -> None:
    """Print a table of at most 120 columns, a line a mark, and what has grown."""
    output.table(title, list(HEADS.values()), [[_cell(name, mark[name]) for name in HEADS] for mark in marks])
    more = grown(marks)
    print("\n".join(["This has grown:", *more] if more else ["Nothing has grown."]))


def _cell(name: str, value: float) -> str:
    return f"{value / _UNITS[name]:.1f}" if name in _UNITS else f"{value:.0f}"


def _counts(folder: Path) -> Mark:
    gc.collect()
    processes = [_PROC / str(pid) for pid in (os.getpid(), *_children(os.getpid()))]
    statuses = [_status(process) for process in processes]
    below = list(folder.rglob("*"))
    return {
        "memory": sum(int(status["VmRSS"].split()[0]) << 10 for status in statuses),
        "objects": len(gc.get_objects()),
        "descriptors": sum(len(os.listdir(process / "fd")) for process in processes),
        "threads": sum(int(status["Threads"]) for status in statuses),
        "processes": len(processes),
        "disk": sum(path.lstat().st_size for path in below if path.is_file() and not path.is_symlink()),
        "names": len(below),
    }


def _children(parent: int) -> list[int]:
    """All processes below ``parent``."""
    found: list[int] = []
    for tasks in (_PROC / str(parent) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += map(int, tasks.read_text().split())
    return [*found, *(below for child in found for below in _children(child))]


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Save as often as was asked for, print the marks; returns 1 if something has grown."""
    parser = argparse.ArgumentParser(description="Whether hundreds of checkpoints leave anything behind.")
    add = parser.add_argument
    add("--saves", type=int, default=500, help=f"how many checkpoints, {MARKS} at least, %(default)s")
    add("--keep", type=int, default=2, help="how many of them stay, %(default)s")
    add("--stager", default="pinned_cached", help="by its name, %(default)s")
    add("--storage", default="dcp", help="by its name, %(default)s")
    add("--dir", default=".", help="a directory on the disk to write to, the current one")
    asked = parser.parse_args(arguments)
    if asked.saves < MARKS:
        parser.error(f"--saves must be at least {MARKS}, not {asked.saves}.")
    torch.set_num_threads(1)  # a pool of them would be counted, and comes up whenever torch likes
    with folder_below(asked.dir) as folder:
        marks = endure(asked.stager, asked.storage, asked.saves, asked.keep, Path(folder))
    title = f"endurance: {asked.stager}+{asked.storage}, {asked.saves} checkpoints of which {asked.keep} stay"
    show(title, marks)
    return int(bool(grown(marks)))


if __name__ == "__main__":
    sys.exit(main())
