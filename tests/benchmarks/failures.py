"""Fails training runs at random, and checks how they go on: `python -m tests.benchmarks.failures --failures 100`.

A chain is one run, in a lab of machines: on one machine with its own launcher and ``restarts``, two ranks, or on three
below an elastic torchrun, one rank each; with and without a tier. What happens to it is drawn: a rank is killed or
frozen, a machine is cut off and connected again, a launcher is killed, or two of these at once; while it trains, at a
named moment of a save, while it starts or restores, or while it starts again after the failure before. Launchers that
have ended are started again, as a scheduler does. Every wait is bounded.

In the end the ledger (:mod:`.ledger`) shows that each sample was trained on once an epoch, in order, and
that model and optimizer were, after each step, those of a run that nothing had interrupted, bit for bit, as long as the
number of ranks was the same. Needs root, as the lab does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stagereg.base import output
from tests.benchmarks import ledger_run
from tests.benchmarks.ledger import Ledger
from tests.support.app import App
from tests.support.crash_points import POINTS, TIER_POINTS
from tests.support.lab import LOCAL, PORT, Lab, Machine, Process, children_of, missing

KILL, FREEZE, CUT, LAUNCHER = "a rank is killed", "a rank is frozen", "a cable is cut", "a launcher is killed"
TWO = "two of these at once"
TRAINING, STEP, SAVING, STARTING = "while it trains", "in a step", "in a save", "while it starts again"
CHAIN = 7  # failures of a run
STEPS = 2500  # of the runs that nothing interrupts
NOTICE_S = 3
AGAIN_S = 6.0  # until a launcher that has ended is started again
LIMIT_S = 240.0  # of any wait; a launcher that comes back may cost two of torch's time-outs, of a minute each
CONFIG = f"""
defaults: [stagereg, _self_]
heartbeat_timeout: {NOTICE_S}
restarts: 20
step_s: 0.03
checkpoint: {{every: 10}}
"""
TIERS = {
    "none": [],
    "memory": ["tier=memory", "tier.dir=/dev/shm/t", "tier.every=2", "checkpoint.every=50"],
    "disk": ["tier=disk", f"tier.dir={LOCAL}/t", "tier.every=2", "checkpoint.every=50"],
}
_LOST = r"rank \d+ failed \(process \d+ on machine\d+\): "
EXPECTED = [
    _LOST + "its process has terminated",
    _LOST + "it was stopped",
    _LOST + f"no heartbeat for {NOTICE_S} s",
    _LOST + r"its heartbeat process at \S+ cannot be reached",
    r"rank \d+: killed by SIGKILL",
    r"rank 0's torchrun or machine failed: the rendezvous store at",
    "its process was killed",  # as the record shows, where all were
    r"Connection (closed|reset) by peer",  # as the record shows, where nobody could say more
]
"""What is said of a failure, in the lines of ranks or the table of a restart."""


class Broken(Exception):
    """A run has not gone on as it is to; reports why, and what was printed."""


@dataclass
class Failed:
    """One failure, and what came of it; ``source`` is empty if another one came before the next step."""

    launcher: str
    kind: str
    moment: str
    at: float
    seconds: float = 0.0  # from the failure to the next step
    again: int = 0  # steps that were done again
    source: str = ""  # what the run has gone on from


class Chain:
    """One run with failures."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.machines = self.draw.choice((1, 3))
        self.tier = self.draw.choice([*TIERS])
        self.kinds = (KILL, FREEZE, CUT, LAUNCHER) if self.machines > 1 else (KILL, KILL, FREEZE, FREEZE, LAUNCHER)
        App(folder, {"app.py": Path(ledger_run.__file__).read_text(), "conf/app.yaml": CONFIG})
        self.folder, self.ledger = folder, Ledger(folder)
        self.processes: list[Process] = []
        self.ended: list[str] = []  # what launchers have printed that have ended
        self.undo_at: dict[int, float] = {}  # when what was done to a machine is undone
        self.undone = 0.0  # when something was done or undone, the last time
        self.start_at: dict[int, float] = {}  # when a launcher that has ended is started again
        self.failed: list[Failed] = []

    def __str__(self) -> str:
        how = "own launcher, 2 ranks" if self.machines == 1 else f"torchrun, {self.machines} machines"
        return f"{how}, tier={self.tier}"

    def run(self, failures: int) -> None:
        """Start it, fail it, and have it end."""
        with Lab(machines=self.machines) as self.lab:
            try:
                self.processes = [self._start(machine) for machine in self.lab.machines]
                self._await(lambda: self.ledger.done() > 0, "it does not train")
                for number in range(failures):
                    self._fail()
                    if number == failures - 1 or self.draw.random() < 0.75:
                        self._go_on()
                (self.folder / "end").write_text(str(self.ledger.done() + 60))
                self._await(self._has_ended, "it does not end")
            except (Broken, AssertionError) as error:
                raise Broken(f"{error}\n{self._story()}") from None
            finally:
                self.ended += [each.output for each in self.processes]

    def _has_ended(self) -> bool:
        """Whether all of it has; launchers that were not with the others at the end fail, since the store is gone."""
        last = self.ledger.attempts[-1]
        return len(last.ended) == last.size and all(each.returncode is not None for each in self.processes)

    def _start(self, machine: Machine) -> Process:
        program = [str(self.folder / "app.py"), f"hydra.run.dir={self.folder}/run", *TIERS[self.tier]]
        command = [sys.executable, *program, "nproc=2", *(["tier.copies=0"] if self.tier != "none" else [])]
        if self.machines > 1:
            meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.lab.machines[0].address}:{PORT}", "--rdzv-id=lab"]
            elastic = [
                "--nnodes=2:3",
                "--max-restarts=1000",
                "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1",
                *meet,
            ]
            command = [sys.executable, "-m", "torch.distributed.run", *elastic, *program]
        return machine.start(command, {"LEDGER": str(self.folder)}, self.folder)

    def _await(self, condition: Callable[[], bool], failure: str, limit_s: float = LIMIT_S) -> None:
        """Wait, with an eye on what ends by itself; raise if it does not come true."""
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                raise Broken(f"{failure} in {limit_s:g} s")
            self._look_after()
            time.sleep(0.01)

    def _look_after(self) -> None:
        """Undo what is to be undone by now, and start launchers again that have ended, as a scheduler does."""
        for number in [number for number, at in self.undo_at.items() if time.time() > at]:
            del self.undo_at[number]
            self.lab.machines[number].thaw()
            self.lab.machines[number].heal()
            self.undone = time.time()
        if (self.folder / "end").exists():
            return
        for number, process in enumerate(self.processes):
            if process.returncode and number not in self.start_at:
                if self.machines == 1 and process.returncode != 128 + signal.SIGKILL:
                    raise Broken(f"it has ended with {process.returncode}")
                self.start_at[number] = time.time() + (AGAIN_S if number else 0.0)
        if 0 in self.start_at:  # it has the store, and so all begin anew
            for machine in self.lab.machines:
                machine.end_processes()
            self.start_at = dict.fromkeys(range(self.machines), 0.0)
        for number in [number for number, at in self.start_at.items() if time.time() > at]:
            del self.start_at[number]
            self.ended.append(self.processes[number].output)
            self.processes[number] = self._start(self.lab.machines[number])

    # -- a failure

    def _fail(self) -> None:
        """Come to a moment, and do something to the run there."""
        draw = self.draw
        kind = draw.choice((*self.kinds, TWO))
        moment, there = self._come_to_moment()
        launcher = "own launcher" if self.machines == 1 else "torchrun"
        self.failed.append(Failed(launcher, kind, moment, time.time()))
        self._done = self.ledger.done()
        self._act(draw.choice(self.kinds) if kind == TWO else kind, there)
        if kind == TWO:
            time.sleep(draw.choice((0.0, 0.3)))
            self._act(draw.choice(self.kinds), None)
        self.undone = time.time()
        (self.folder / "reached").unlink(missing_ok=True)

    def _come_to_moment(self) -> tuple[str, int | None]:
        """Return its name, and which process has come to it, if it is one that processes come to."""
        draw = self.draw
        if self.failed and not self.failed[-1].source:
            if draw.random() < 0.5:
                return STARTING, self._come_to(draw.choice(("start", "restoring", "locked")))
            time.sleep(draw.uniform(0.1, 3 * NOTICE_S))
            return STARTING, None
        moment = draw.choice((TRAINING, STEP, SAVING))
        if moment == TRAINING:
            time.sleep(draw.uniform(0.0, 2.0))
            return moment, None
        point = draw.choice([*POINTS, *(TIER_POINTS if self.tier != "none" else ())])
        return moment, self._come_to("step" if moment == STEP else point)

    def _come_to(self, point: str) -> int | None:
        """Wait until a process comes to a point, for a few seconds, and return it."""
        (self.folder / "reached").unlink(missing_ok=True)
        (self.folder / f"at {point}").write_text("")
        known = len(self.ledger.reached)

        def came() -> bool:
            return bool(self.ledger.attempts) and len(self.ledger.reached) > known

        try:
            self._await(came, point, 10.0)
        except Broken:
            return None
        finally:
            (self.folder / f"at {point}").unlink(missing_ok=True)
        host, own = self.ledger.reached[-1]
        [machine] = [number for number, each in enumerate(self.lab.machines) if each.name == host]
        return next((pid for pid in self._ranks(machine) if _own_number(pid) == own), None)

    def _ranks(self, machine: int) -> list[int]:
        """Return the processes of the ranks on a machine, as this host has them."""
        found = list[int]()
        for child in children_of(self.processes[machine].pid or 0):
            found += children_of(child) if "stagereg.extensions.recovery.warm" in _command(child) else [child]
        return [
            each
            for each in found
            if "app.py" in _command(each) or "stagereg.extensions.recovery.warm" in _command(each)
        ]

    def _act(self, kind: str, there: int | None) -> None:
        """Do it to the process that has come to the moment, or to another one."""
        draw, number = self.draw, self.draw.randrange(self.machines)
        running = [(machine, pid) for machine in range(self.machines) for pid in self._ranks(machine)]
        if kind in (KILL, FREEZE):
            if not running:
                return
            machine, pid = draw.choice(
                [each for each in running if each[1] == there and draw.random() < 0.7] or running
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kind == KILL else signal.SIGSTOP)
            if kind == FREEZE:
                self.undo_at[machine] = time.time() + 4 * NOTICE_S
        elif kind == LAUNCHER:
            self.processes[number].kill()
        else:
            self.lab.machines[number].cut()
            self.undo_at[number] = time.time() + draw.uniform(0.3, 5.0) * NOTICE_S

    def _go_on(self) -> None:
        """Wait until it trains again."""
        last = self.failed[-1]

        def goes_on() -> bool:
            attempts = self.ledger.attempts
            later = [each for each in attempts if each.t > last.at]
            if any(len(each.at) > 1 for each in later):
                return True
            since = math.inf if self.undo_at else self.undone
            return sum(at > since for at in attempts[-1].at.values()) > 2

        self._await(goes_on, f"after {last} it does not go on")
        later = [each for each in self.ledger.attempts if each.t > last.at and each.at]
        last.source = later[0].source if later else "nothing was lost"
        if later:
            last.again = max(0, self._done - later[0].start)
            last.seconds = min(later[0].at.values()) - last.at

    # -- what was seen

    def whys(self) -> list[str]:
        """Return what the tables of restarts say of the failures before."""
        events = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        return [each["why"] for each in events if each["event"] == "restart"]

    def _story(self) -> str:
        attempts = [f"{each.t:.1f}: {each.size} from {each.start} ({each.source})" for each in self.ledger.attempts]
        printed = [*self.ended, *(each.output for each in self.processes)]
        return "\n".join([*map(str, self.failed), *attempts, *(f"--- printed\n{text[-5000:]}" for text in printed)])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _own_number(pid: int) -> int:
    """Return the number that a process has in its machine."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


class References(dict[int, list[int]]):
    """The checksums after each step of runs that nothing interrupts, by the number of ranks, once they are needed."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __missing__(self, size: int) -> list[int]:
        folder = self._place / f"uninterrupted-{size}"
        App(folder, {"app.py": Path(ledger_run.__file__).read_text(), "conf/app.yaml": CONFIG})
        ledger = Ledger(folder)
        (folder / "end").write_text(str(STEPS))
        command = [sys.executable, "app.py", f"nproc={size}", "step_s=0", "checkpoint.every=100000"]
        env = {**os.environ, "LEDGER": str(folder)}
        subprocess.run(command, cwd=folder, env=env, timeout=LIMIT_S, check=True, capture_output=True)
        self[size] = [attempt.checksums[step][0] for step, attempt in ledger.counted()]
        return self[size]


@dataclass
class Seen:
    """What all chains have shown."""

    failed: list[Failed] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    chains: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, seed: int, failures: int, references: Mapping[int, Sequence[int]], folder: Path) -> None:
        """Run a chain."""
        chain = Chain(seed, folder)
        try:
            chain.run(failures)
            steps, compared = chain.ledger.check(references)
        except (Broken, AssertionError) as error:
            self.broken.append(f"seed {seed}, {chain}: {error}")
            print(f"\nBROKEN: {self.broken[-1]}", file=sys.stderr, flush=True)
        else:
            how = "bit for bit" if compared else "positions"
            self.chains.append(f"seed {seed}, {chain}: {len(chain.failed)} failures, {steps} steps, {how}")
            print(self.chains[-1], flush=True)
        self.failed += chain.failed
        said = [line for text in chain.ended for line in re.findall(r"^rank \d+: .*", text, re.MULTILINE)]
        for text in [*chain.whys(), *said]:
            known = next((each for each in EXPECTED if re.search(each, text)), None)
            self.said[known or text] += 1
            self.broken += [] if known else [f"seed {seed}, {chain}: it was said: {text}"]

    def table(self, by: Callable[[Failed], str]) -> list[list[str]]:
        """Return the rows of a table."""
        rows = []
        for name in sorted({*map(by, self.failed)}):
            mine = [each for each in self.failed if by(each) == name]
            alone = [each for each in mine if each.source not in ("", "nothing was lost")]
            again, seconds = (
                sorted(each.again for each in alone) or [0],
                sorted(each.seconds for each in alone) or [0.0],
            )
            sources = Counter(each.source or "another failure" for each in mine)
            figures = f"{again[len(again) // 2]} / {again[-1]}", f"{seconds[len(seconds) // 2]:.1f} / {seconds[-1]:.1f}"
            rows.append([name, str(len(mine)), *figures, ", ".join(f"{n} {what}" for what, n in sources.most_common())])
        return rows


def main() -> int:
    """Fail runs, and print the tables; the status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first chain")
    parser.add_argument("--chain", type=int, default=CHAIN, help="failures of each chain")
    asked = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    began, seen, seed = time.monotonic(), Seen(), asked.seed
    with tempfile.TemporaryDirectory(prefix="stagereg-failures-") as place:
        references = References(Path(place))
        while len(seen.failed) < asked.failures and len(seen.broken) < 4:
            (folder := Path(place, str(seed))).mkdir()
            seen.add(seed, min(asked.chain, asked.failures - len(seen.failed)), references, folder)
            seed += 1
    head = ["failures", "steps again, median / most", "s to the next step, median / most", "went on from"]
    output.table("", ["what", *head], seen.table(lambda each: f"{each.launcher}: {each.kind}"))
    output.table("", ["when", *head], seen.table(lambda each: each.moment))
    output.table("", ["what was said", "times"], [[why, str(n)] for why, n in seen.said.most_common()])
    print(f"{len(seen.failed)} failures, {time.monotonic() - began:.0f} s, seeds {asked.seed} to {seed - 1}")
    print("\n".join(seen.broken) or "Each sample was trained on once an epoch, in order.")
    return 1 if seen.broken else 0


if __name__ == "__main__":
    sys.exit(main())
