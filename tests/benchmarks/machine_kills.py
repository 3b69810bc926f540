"""Kills runs with a tier, machines and all, and starts them again: `python tests/benchmarks/machine_kills.py`.

Each chain is a lab of machines and several kills in it: of a process, of a launcher whose ranks go on, of a machine,
or, with two copies on four machines, of two. The machine comes back as it was, empty, or not at all. After each kill it
is checked that the next run, on the machines that there are, in any order, takes up the newest step of which some
machine has each part, bit for bit; that this is none before the newest one that was noted to be copied; and that no
wait takes longer than 30 s. Needs root, as the lab does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from stagereg.base import output
from stagereg.checkpoint.format.manifest import MANIFEST
from tests.support.lab import Lab, missing
from tests.support.tier_runs import Runs, now

CHAIN = 8
PROCESS, LAUNCHER, MACHINE, TWO = "a process", "a launcher", "a machine", "two machines"


class Broken(Exception):
    """Something was lost; reports what, and the output of the ranks."""


@dataclass
class Table:
    """What kills have cost, by what was killed."""

    kills: Counter[str] = field(default_factory=Counter)
    lost: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # steps
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of calls of restore
    scratch: Counter[str] = field(default_factory=Counter)  # killed before any step was complete

    def rows(self) -> list[list[str]]:
        found = []
        for what, count in self.kills.items():
            lost, seconds = sorted(self.lost[what]) or [0], sorted(self.seconds[what]) or [0.0]
            middle = f"{lost[len(lost) // 2]}", f"{seconds[len(seconds) // 2]:.2f}"
            found.append([what, str(count), middle[0], str(lost[-1]), middle[1], f"{seconds[-1]:.2f}"])
            found[-1].append(str(self.scratch[what]))
        return found


class Chain:
    """One lab, with kills one after the other."""

    def __init__(self, draw: random.Random, table: Table, folder: Path) -> None:
        self.draw, self.table, self.folder = draw, table, folder
        self.copies = draw.choice((1, 1, 2))
        self.options = {
            "tier": draw.choice(("memory", "disk")),
            "copies": self.copies,
            "every": draw.choice((1, 2, 3)),
            "step_s": draw.choice((0.0, 0.02, 0.1)),
            "width": draw.choice((16, 200, 1000)),
            "shard": draw.choice(("fsdp2", "fsdp2", "ddp")),
            "steps": 100000,
            "max_crashes": 0,
            "calm": "false",
        }
        if draw.random() < 0.3:
            self.options |= {"store": folder / "store", "store_every": 7}
        self.nproc = draw.choice((1, 1, 2))

    def run(self, kills: int) -> None:
        with Lab(machines=self.copies + 2) as lab:
            runs, on = Runs(lab, self.folder, **self.options), [*range(self.copies + 2)]
            for number in range(kills):
                on = self._kill(runs, on, f"kill {number}")

    def _kill(self, runs: Runs, on: list[int], where: str) -> list[int]:
        draw, began = self.draw, now()
        what = draw.choice((PROCESS, LAUNCHER, MACHINE, MACHINE if self.copies == 1 else TWO))
        job = runs.start(on, self.nproc)
        try:
            self._expect(runs, runs.restored(job), what)
            time.sleep(draw.choice((0.0, 0.3, 1.0)) + draw.random())
            copied = runs.copied(min(self.copies, len(on) - 1), began)
            lost = draw.sample(on, {MACHINE: 1, TWO: min(2, len(on) - 1)}.get(what, 0))
            silent = draw.random() < 0.5
            for each in lost:
                runs.lab.machines[each].kill(silent=silent)
            victim = [*job.processes.values()][draw.randrange(len(on))]
            if what == PROCESS:
                victim.kill_rank(draw.randrange(self.nproc))
            elif what == LAUNCHER:
                victim.kill_launcher()
            time.sleep(draw.random())
            if what == LAUNCHER:
                for machine, process in job.processes.items():
                    if process is not victim:
                        machine.end_processes()
            else:
                runs.end()
            self.newest, self.was = max(runs.newest() or 0, self._stored()), what
            self.table.kills[what] += 1
            if (copied or 0) > self.newest:
                raise Broken(f"step {copied} was copied, and {self.newest} is the newest that is left")
            return self._machines(runs, on, lost)
        except (AssertionError, Broken) as error:
            raise Broken(f"{self.options}, nproc={self.nproc}, {where}, {what}: {error}\n{_tails(job)}") from None

    newest, was = 0, ""

    def _expect(self, runs: Runs, found: object, what: str) -> None:
        step, _, seconds = found  # type: ignore[misc]
        if (step or 0) != self.newest:
            raise Broken(f"step {step} was restored after {self.was}, and {self.newest} is there")
        if self.was:
            self.table.seconds[self.was].append(seconds)
            if step is None:
                self.table.scratch[self.was] += 1
            else:
                self.table.lost[self.was].append(max(0, self.done - step))
        self.done = 0

    done = 0

    def _stored(self) -> int:
        names = [path.name for path in self.folder.glob("store/step-*") if (path / MANIFEST).exists()]
        return max((int(name[5:13]) for name in names), default=0)

    def _machines(self, runs: Runs, on: list[int], lost: list[int]) -> list[int]:
        """Return on which machines the next run is, in which order, once those that were lost are as they will be."""
        draw = self.draw
        self.done = runs.done()
        for each in lost:
            fate = draw.choice(("back", "empty", "gone"))
            if fate == "back":
                runs.lab.machines[each].reboot()
            elif fate == "empty":
                runs.lab.machines[each].replace(same_name=draw.random() < 0.5)
        there = [number for number, machine in enumerate(runs.lab.machines) if machine.is_on]
        if len(there) < 2:
            gone = [number for number in range(len(runs.lab.machines)) if number not in there]
            runs.lab.machines[gone[0]].reboot()
            there.append(gone[0])
        self.newest = max(runs.newest(there) or 0, self._stored())
        draw.shuffle(there)
        return there


def _tails(job: object) -> str:
    return "\n".join(f"--- {m.name}\n{p.report()[-3000:]}" for m, p in job.processes.items())  # type: ignore[attr-defined]


def main() -> int:
    """Kill, and print the table; the status is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the kills that are drawn")
    asked = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    began, table, failures = time.monotonic(), Table(), []
    seed = asked.seed
    while table.kills.total() < asked.kills:
        with tempfile.TemporaryDirectory(prefix="stagereg-kills-") as folder:
            try:
                Chain(random.Random(seed), table, Path(folder)).run(min(CHAIN, asked.kills - table.kills.total()))
            except Broken as broken:
                failures.append(f"seed {seed}: {broken}")
                print(f"\nLOST: {failures[-1]}", file=sys.stderr, flush=True)
                if len(failures) > 3:
                    break
        seed += 1
    head = ["killed", "kills", "steps lost, median", "most", "restored in s, median", "most", "from scratch"]
    output.table("", head, table.rows())
    print(f"{table.kills.total()} kills, {time.monotonic() - began:.0f} s, seeds {asked.seed} to {seed - 1}")
    if not failures:
        print("Every run went on from the newest complete step, bit for bit, and none was lost that was copied.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
