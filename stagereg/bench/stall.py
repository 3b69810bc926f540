"""``stagereg bench stall``: what a checkpoint costs the training it interrupts.

A segment is one checkpoint, four steps, and waiting until it is durable; *lost* is a segment less the segment without a
checkpoint of the same round. One group a number of torch threads, each measured in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stagereg.bench.loop import StallSettings, StallTraining
from stagereg.bench.measure import Series
from stagereg.bench.report import Group, Line
from stagereg.errors import LaunchError

__all__ = ["BASE", "group", "measured", "row_names"]

BASE = "none"
"""The row without a checkpoint, which all others are held against."""

_STAGERS = ("blocking", "pinned_cached", "overlapped", "shared")
_STORAGES = ("dcp", "direct")
_LINES = 12  # of the output of a loop that died


def row_names() -> list[str]:
    """The names of all rows there are."""
    ours = [f"{stager}+{storage}" for stager in _STAGERS for storage in _STORAGES]
    return [BASE, "torch:async_save", "torch:process", *ours, f"again:{BASE}"]


def measured(rows: Sequence[str], rounds: int, threads: int, scale: float, device: str, folder: Path) -> list[Series]:
    """Measure the loop in a process of its own with so many torch threads.

    Raises:
        LaunchError: that process ended before it was done.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        result = Path(place, "result.json")
        Path(place, "checkpoints").mkdir()
        settings = StallSettings(
            tuple(rows), rounds, threads, scale, device, str(Path(place, "checkpoints")), str(result)
        )
        # torch's save process asks for the machine's name otherwise, which need not lead anywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1"}
        argument = json.dumps(dataclasses.asdict(settings))
        command = [sys.executable, "-m", "stagereg.bench.loop", argument]
        printed = Path(place, "printed")
        with printed.open("wb") as errors:
            ended = subprocess.run(command, env=environment, stdout=sys.__stderr__, stderr=errors)
        if ended.returncode:
            last = "\n".join(printed.read_text(errors="replace").splitlines()[-_LINES:])
            raise LaunchError(
                f"The training loop with {threads} torch threads ended with exit code {ended.returncode}. "
                f"Its last output:\n{last}"
            )
        return [Series(**one) for one in json.loads(result.read_text())]


def group(name: str, title: str, series: Sequence[Series]) -> Group:
    """Make the rows of a table from what was measured: what each has lost, and how long the call took."""
    by_row = {one.row: one for one in series}
    base = by_row[BASE]
    lines: list[Line] = []
    for one in series:
        if one.row.endswith(":blocked"):
            continue
        line = Line(one.row, missing=one.missing, failure=one.failure)
        if one.samples and base.samples:
            lost = [mine - without for mine, without in zip(one.samples, base.samples, strict=True)]
            blocked = by_row[f"{one.row}:blocked"].samples
            step = base.median / StallTraining.STEPS
            figures = {"lost": lost, "blocked": blocked, "segment": one.samples}
            line = Line(one.row, figures, step_seconds=step)
        lines.append(line)
    return Group(name, title, lines)
