"""Runs with a tier on the machines of a lab: they are started, killed and started again, and what is left is looked at.

What the folders of machines hold is read here from the files alone, so that what a run restores is compared with what
there was, and not with what the run believes.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.extensions.tiers import train

from . import forked_job
from .lab import LOCAL, Job, Lab, Machine

START_S = 30.0
"""How long a run may take from its start to its first step, and any wait of it."""


class Restored(NamedTuple):
    """What a run has gone on from, as rank 0 says."""

    step: int | None
    path: str
    seconds: float  # of the call of ``restore``


class Left(NamedTuple):
    """One save, as it lies on machines."""

    branch: int
    serial: int
    step: int
    world_size: int
    on: dict[int, list[int]]  # by rank, the numbers of the machines that have its part
    noted: dict[int, list[str]]  # by rank, the machines that are noted to have a copy of its part

    @property
    def is_whole(self) -> bool:
        """Whether each rank's part lies somewhere."""
        return len(self.on) == self.world_size


class Runs:
    """Runs of one training program in one lab.

    Args:
        lab: the machines.
        folder: what they share: what the state was at each step, and the store if there is one.
        options: of the program, for all runs.
    """

    def __init__(self, lab: Lab, folder: Path, **options: Any) -> None:
        (folder / "truth").mkdir(exist_ok=True)
        self.lab, self.folder, self.output = lab, folder, ""
        tier = options.get("tier", "memory")
        place = {"dir": f"{LOCAL}/t" if tier == "disk" else "/dev/shm/t"}
        self._options = train.USUAL | {
            "truth": str(folder / "truth"),
            "steps": 1000,
            "calm": "true",
            **place,
            **options,
        }
        self._in_memory = tier == "memory"
        self.job: Job | None = None

    def start(self, machines: Sequence[int] | None = None, nproc: int = 1, **options: Any) -> Job:
        """Start a run on these machines, all by default; the first one has rank 0."""
        chosen = [*range(len(self.lab.machines))] if machines is None else machines
        self.job = forked_job.start(self.lab, train.main, {**self._options, **options}, chosen, nproc)
        return self.job

    def restored(self, job: Job) -> Restored:
        """Wait until a run has restored, and return what."""
        first = next(iter(job.processes.values()))
        first.await_output("RESTORED", START_S)
        found = re.search(r"RESTORED (\d+|None) from (.*) in ([\d.]+) s", first.output)
        assert found is not None, first.output
        step = None if found[1] == "None" else int(found[1])
        return Restored(step, found[2], float(found[3]))

    def hold(self, at: int, machines: Sequence[int] | None = None, **options: Any) -> Restored:
        """Run until all ranks wait after this step, with all copies made, and return what was restored before."""
        job = self.start(machines, hold=at, **options)
        for process in job.processes.values():
            process.await_output(f"HOLDS at {at}", 2 * START_S)
        self.output = "\n".join(process.output for process in job.processes.values())
        return self.restored(job)

    def finish(self, machines: Sequence[int] | None = None, **options: Any) -> Restored:
        """Run to the end, and return what was restored; what was printed is in ``output``."""
        job = self.start(machines, **options)
        self.output = "\n".join(job.wait(2 * START_S))
        assert job.returncodes == [0] * len(job.returncodes), self.output
        return self.restored(job)

    def end(self) -> None:
        """Kill all processes of the machines that are on."""
        for machine in self.lab.machines:
            machine.end_processes()

    # -- what is left

    def tier_of(self, machine: Machine) -> Path:
        """Return the folder of the tier on a machine, seen from outside."""
        return (machine.shm if self._in_memory else machine.disk) / "t"

    def parts(self, machine: Machine) -> list[Path]:
        """Return the manifests of the complete parts on a machine."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):  # a run deletes an older step at this moment
                return [
                    path for path in sorted(self.tier_of(machine).glob("*/step-*/part-*.json")) if _is_complete(path)
                ]
        return []

    def left(self, machines: Sequence[int] | None = None, since: float = 0.0) -> list[Left]:
        """Return the saves that these machines have, those that are on by default, the latest first.

        ``since``: notes of copies count that were written after this time.
        """
        found: dict[str, Left] = {}
        on: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        noted: dict[str, dict[int, list[str]]] = defaultdict(dict)
        for number, machine in enumerate(self.lab.machines):
            if number not in machines if machines is not None else not machine.is_on:
                continue
            for path in self.parts(machine):
                data = _read(path)
                if data is None:
                    continue
                _, branch, serial, step, token, world_size = data["save"]
                on[token][data["rank"]].append(number)
                note = path.with_name(f"{path.name}.copied")
                if note.exists() and note.stat().st_mtime > since:
                    noted[token][data["rank"]] = note.read_text().split("\n")
                found[token] = Left(branch, serial, step, world_size, on[token], noted[token])
        return sorted(found.values(), key=lambda each: (each.branch, each.serial), reverse=True)

    def branches(self) -> list[tuple[int, int]]:
        """Return each branch that is noted anywhere, with the step that it began from."""
        notes = [*self.folder.glob("store/.run.json")]
        for machine in self.lab.machines:
            notes += [*self.tier_of(machine).glob(".run.json"), *self.tier_of(machine).glob("*/.run.json")]
        return sorted({(number, step) for data in map(_read, notes) if data for number, step, _ in data["branches"]})

    def newest(self, machines: Sequence[int] | None = None) -> int | None:
        """Return the newest step that can be restored from these machines, of what no later branch has given up."""
        branches = self.branches()
        for each in self.left(machines):
            later = [step for number, step in branches if number > each.branch]
            if each.is_whole and all(each.step <= step for step in later):
                return each.step
        return None

    def copied(self, copies: int, since: float) -> int | None:
        """Return the newest step of which each part is noted, since then, to have so many copies on other machines."""
        for each in self.left(since=since):
            if len(each.noted) == each.world_size and all(len(names) >= copies for names in each.noted.values()):
                return each.step
        return None

    def done(self) -> int:
        """Return the last step that was trained."""
        return max((int(path.name) for path in (self.folder / "truth").iterdir() if path.name.isdigit()), default=0)


def now() -> float:
    """Return the time, as files have it."""
    return time.time()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _is_complete(path: Path) -> bool:
    data = _read(path)
    try:
        return all((path.parent / name).stat().st_size == file["nbytes"] for name, file in data["files"].items())
    except (OSError, TypeError, KeyError):
        return False
