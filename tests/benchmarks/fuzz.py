"""Feeds every reader of foreign data with seeded mutations: ``make fuzz``, or ``python tests/benchmarks/fuzz.py``.

A kind of input is sealed manifests, indexes, structures, zip archives, ``.metadata``, notes, or wire messages. Each
input is read by all that a user would run on it, in a worker process of at most 1 GiB more memory than it began with.
A reading must end in the right value or in a ``StageregError``, within ten seconds. It must not write outside its
folder, start a process, import what the input names, or change torch's settings. Anything else is a finding: it is
written to the output folder, and the exit code is 1. ``--kind zips --seed 3 --only 417`` makes one input again.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

KINDS = ("manifests", "indexes", "structures", "zips", "metadata", "notes", "wire")
PROGRAM = [sys.executable, "-m", "tests.benchmarks.fuzz"]
LIMIT_S = 10.0  # that a reading may take
HUNG, BROKEN = 3, 4  # exit codes of a worker: in a reading that hangs, and by an error of its own
_SHOWN = 5  # findings of one sort that are written as files
_ROOT = Path(__file__).parents[2]
PRIVATE = "private-5d41402abc4b"  # in a file and in a variable that no input gives a right to
# glibc fills fresh memory with 0xA5 and freed memory with 0x5A, so that uninitialised memory in a tensor is seen.
_ENVIRONMENT = {"MALLOC_PERTURB_": "90", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# Files beside the inputs.
_USERS = {
    "home/.bashrc": "mine\n",
    "home/docs/thesis": "years\n",
    "evil.py": "import this\n",
}  # files beside the inputs


@dataclass
class Finding:
    """A reading that ended wrongly."""

    kind: str
    seed: int
    number: int
    action: str  # what was run
    what: str  # in short, without what differs between inputs
    place: str  # the function of the package that is to blame
    how: str = ""  # the mutation
    text: str = ""  # all of it

    @property
    def again(self) -> str:
        """The command that makes this input again."""
        return f"python tests/benchmarks/fuzz.py --kind {self.kind} --seed {self.seed} --only {self.number}"


@dataclass
class Task:
    """Inputs of one kind, which a worker makes; another worker makes those that are left when one ends."""

    kind: str
    next: int
    last: int
    ends: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


class Worker:
    """A process that makes the inputs of a task."""

    def __init__(self, task: Task, seed: int, scratch: Path) -> None:
        self.task, self.seed, self._scratch = task, seed, Path(tempfile.mkdtemp(dir=scratch))
        for name, content in {
            "home/.bashrc": "mine\n",
            "home/docs/thesis": "years\n",
            "evil.py": "import this\n",
        }.items():
            path = self._scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        about = ["--kind", task.kind, "--seed", seed, "--first", task.next, "--count", task.last - task.next]
        command = [*PROGRAM, "--worker", self._scratch, *about]
        ours = {"HOME": str(self._scratch / "home"), "FUZZ_PRIVATE": PRIVATE, "PYTHONPATH": str(_ROOT)}
        self.log = self._scratch / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=log, env={**os.environ, **_ENVIRONMENT, **ours}
            )
        self.began = self.heard = time.monotonic()
        self._came, self._at = b"", task.next - 1
        self.pipe = self.process.stdout
        assert self.pipe is not None
        os.set_blocking(self.pipe.fileno(), False)

    def take(self) -> bool:
        """Take what it has reported; whether it goes on."""
        assert self.pipe is not None
        data = self.pipe.read() or b""
        self.heard = time.monotonic() if data else self.heard
        *lines, self._came = (self._came + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "begin" in told:
                self._at = told["begin"][1]
            else:
                self.task.next = told["end"][1] + 1
                self.task.ends.update(told["ends"])
                self.task.findings += [Finding(**each) for each in told["found"]]
        late = time.monotonic() - self.heard
        if data or (self.process.poll() is None and late < 3 * LIMIT_S + 270 * (self._at < self.task.next)):
            return True
        self._end()
        return False

    def _end(self) -> None:
        """Note how it ended; one that died in an input has found something."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self.task.seconds += time.monotonic() - self.began
        log = self.log.read_text(errors="replace")
        if code == BROKEN or (self._at < self.task.next and code not in (0, HUNG)):
            raise RuntimeError(f"the fuzz target itself has failed:\n{log[-3000:]}")
        if self._at >= self.task.next:  # it has begun an input, and did not end it
            what = "hangs, and no signal ends it" if code == -signal.SIGKILL else f"ends the process: {code}"
            self.task.findings.append(Finding(self.task.kind, self.seed, self._at, "", what, "", text=log[-3000:]))
            self.task.next = self._at + 1
        shutil.rmtree(self._scratch, ignore_errors=True)


def fuzz(tasks: Sequence[Task], seed: int, jobs: int, scratch: Path) -> None:
    """Make all inputs, so many kinds at a time, and fill in the tasks."""
    waiting, running = [*tasks], list[Worker]()
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < jobs:
                worker = Worker(waiting.pop(0), seed, scratch)
                running.append(worker)
                selector.register(worker.pipe, selectors.EVENT_READ)
            selector.select(1.0)
            for worker in [*running]:
                if worker.take():
                    continue
                running.remove(worker)
                selector.unregister(worker.pipe)
                if worker.task.next < worker.task.last:
                    waiting.insert(0, worker.task)
                else:
                    _show(worker.task)


def _show(task: Task) -> None:
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(task.ends.items()))
    sorts = len({(each.what, each.place) for each in task.findings})
    print(
        f"{task.kind:11} {len(task.findings):6,} findings of {sorts} sorts; readings: {ends}; {task.seconds:.0f} s",
        flush=True,
    )


def summarise(findings: Sequence[Finding], out: Path) -> None:
    """Print one line for each sort of findings, and write the first findings of each sort as files."""
    sorts: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for each in findings:
        sorts[each.kind, each.action.split(" ")[0], each.what, each.place].append(each)
    for (kind, action, what, place), found in sorted(sorts.items()):
        print(f"{kind}: {action} {what}{f' in {place}' if place else ''}: {len(found)} times; {found[0].how[:100]!r}")
        print(f"  {found[0].again}")
        for each in found[:_SHOWN]:
            (out / f"{kind}-{each.seed}-{each.number}.json").write_text(
                json.dumps({**asdict(each), "again": each.again}, indent=1)
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="one kind; several times for several")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=5000, help="inputs of each kind")
    parser.add_argument("--only", type=int, help="the number of the one input to make")
    parser.add_argument("--out", type=Path, default=Path("fuzz-report"), help="the folder for findings")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers at a time")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.worker is not None:
        from tests.benchmarks.fuzz_watch import work  # imports torch

        return work(asked, asked.worker)
    first, count = (asked.first, asked.count) if asked.only is None else (asked.only, 1)
    tasks = [Task(kind, first, first + count) for kind in asked.kind or KINDS]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="stagereg-fuzz-", dir=memory))
    began = time.monotonic()
    try:
        fuzz(tasks, asked.seed, asked.jobs, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    findings = [each for task in tasks for each in task.findings]
    if findings:
        asked.out.mkdir(parents=True, exist_ok=True)
        summarise(findings, asked.out)
    if asked.only is not None:
        print("\n".join(each.text for each in findings))
    made, seconds = count * len(tasks), time.monotonic() - began
    where = f"; the first of each sort are in {asked.out}" if findings else ""
    print(f"Seed {asked.seed}, {made:,} inputs, {seconds:.0f} s: {len(findings) or 'no'} findings{where}.")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
