"""Kills training runs, starts them again, and checks what is left: `python tests/benchmarks/kills.py`.

A chain is one directory of checkpoints and several kills: a run is killed, the next one goes on from what is there and
is killed itself, and the last one goes on to the end. After each kill it is checked that every step directory is a
complete checkpoint, that none is older than what a rank knew to be committed, and that the next run takes up the newest
one with parameters, optimizer, scheduler and random numbers, on each rank, equal bit for bit to those that an
uninterrupted run had at that step. The end of the chain must equal the end of the uninterrupted run. Some steps are
saved twice, and have their plain names in the end.

The program imports torch once and forks the ranks before torch has run any thread. Every wait is bounded.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor
import torch.nn.parallel

import stagereg
import stagereg.checkpoint.store.failpoints as failpoints
from stagereg.assembly import Checkpointer
from stagereg.base import output
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.registry import find

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.crash_points import POINTS

RANKS, STEPS, EVERY, WIDTH = 2, 10, 2, 256
KEEP, KEPT = stagereg.Keep(newest=2, every=4), {4, 8, 10}  # the policy, and the steps that it leaves in the end
SAVED = [step for step in range(EVERY, STEPS + 1, EVERY) for _ in range(2 if step in (4, 8) else 1)]  # some twice
LIMIT_S = 300.0  # of one run; nothing here takes a tenth of it on an idle machine
LINGER_S = 2.0  # for the other rank to notice, which is no promise; a launcher would end it as well
FORKED = multiprocessing.get_context("fork")
ATTEMPTS = 4
CHAIN = 5
ONE, ALL = "one rank", "all ranks"
RANDOM = "a random moment"
NAMED = list(POINTS)
BY_RANK_0 = {"locked", "swept", *NAMED[NAMED.index("marked") :]} - {"ended"}
START = {"locked", "swept"}


@dataclass(frozen=True)
class Setup:
    """What runs."""

    storage: str = "dcp"
    stager: str = "overlapped"


SETUPS = [Setup(storage, stager) for stager in ("overlapped", "pinned_cached") for storage in ("dcp", "safetensors")]


@dataclass(frozen=True)
class Kill:
    """One kill: at the ``nth`` time that ``rank`` reaches a point, or at a fraction of a run's duration."""

    victim: str
    when: str = RANDOM
    rank: int = 0
    nth: int = 1
    moment: float = 0.0


# -- in a rank


@dataclass
class Observer:
    """Records what a rank has reached, and kills when it is time."""

    kill: Kill | None
    rank: int
    folder: Path
    pids: list[int]
    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, name: str) -> None:
        self.seen[name] += 1
        append_line(self.folder, self.rank, point=name)
        kill = self.kill
        if kill is not None and (kill.when, kill.rank, kill.nth) == (name, self.rank, self.seen[name]):
            for pid in sorted(self.pids if kill.victim == ALL else [os.getpid()], key=os.getpid().__eq__):
                os.kill(pid, signal.SIGKILL)  # itself last


def append_line(folder: Path, rank: int, **what: Any) -> None:
    """Append a line that outlives a SIGKILL."""
    descriptor = os.open(folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (json.dumps(what) + "\n").encode())
    os.close(descriptor)


def train(setup: Setup, rank: int, root: Path, folder: Path, kill: Kill | None) -> None:
    """Train; deterministic as long as the random numbers are."""
    store = f"file://{folder / 'rendezvous'}"
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    pids = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    torch.manual_seed(rank)
    random.seed(rank)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    own = f"drawn.rank{rank}"
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, own: 0.0}
    stager, storage = stagereg.build("stager", setup.stager), stagereg.build("storage", setup.storage)
    failpoints.watch(Observer(kill, rank, folder, pids))
    never = Restore(max_crashes=None)
    with Checkpointer(str(root), EVERY, KEEP, "auto", stager, storage, restore=never) as checkpointer:
        start = checkpointer.restore(state) or 0
        append_line(folder, rank, state=(start, digest(state)))
        for step in range(start + 1, STEPS + 1):
            state[own] += random.random()
            loss = model(torch.randn(4, WIDTH)).square().mean() * random.random()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            append_line(folder, rank, state=(step, digest(state)))
            checkpointer.maybe_save(step, state)
            if SAVED.count(step) > 1:
                checkpointer.save(step, state)
    append_line(folder, rank, state=("the end", digest(state)))
    dist.barrier()


def digest(state: dict[str, Any]) -> str:
    """Return a hash of all that a checkpoint is to bring back on this rank, the random numbers included."""
    sha = hashlib.sha256(repr((random.getstate(), torch.get_rng_state().tolist())).encode())
    for name, value in state.items():
        _add(sha, name.removesuffix(".module"), value.state_dict() if hasattr(value, "state_dict") else value)
    return sha.hexdigest()


def _add(sha: Any, name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _add(sha, f"{name}/{key}", inner)
    elif isinstance(value, torch.Tensor):
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.detach().numpy().tobytes())
    else:
        sha.update(f"{name} {value!r}".encode())


# -- around the ranks


class Broken(Exception):
    """Something was lost; reports what, and the output of the ranks."""


@dataclass
class RunResult:
    """What the ranks of one run reported, and how they ended."""

    folder: Path
    codes: list[int]
    seconds: float
    dead: int  # ranks that the kill has ended; those that had not noticed, and were ended afterwards, do not count

    def of(self, rank: int, key: str) -> list[Any]:
        file = self.folder / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line[key] for line in lines if key in line]

    def states(self, rank: int) -> list[tuple[int, str]]:
        """Steps and digests: what the rank has started from, and what it had after each step."""
        return [(step, found) for step, found in self.of(rank, "state")]

    def committed(self) -> int:
        """The step of the last save that rank 0 has reported as durable."""
        count = self.of(0, "point").count("committed")
        return [step for step in SAVED if step > self.states(0)[0][0]][count - 1] if count else 0

    def output(self) -> str:
        texts = [(self.folder / f"rank{rank}.out").read_text(errors="replace")[-3000:] for rank in range(RANKS)]
        return "\n".join(f"--- rank {rank}, {self.codes[rank]}:\n{text}" for rank, text in enumerate(texts))


def run(setup: Setup, root: Path, folder: Path, kill: Kill | None = None, full: float = 0) -> RunResult:
    """Run the ranks, killing as asked, until all have ended.

    ``full`` is how many seconds an uninterrupted run takes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    ranks = [FORKED.Process(target=_rank, args=(setup, rank, root, folder, kill)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    try:
        if kill is not None and kill.when == RANDOM and not _ended(ranks, began + kill.moment * full):
            for rank in ranks if kill.victim == ALL else [ranks[kill.rank]]:
                rank.kill()
        deadline = began + LIMIT_S
        while (left := [rank for rank in ranks if rank.is_alive()]) and _ended(left, deadline):
            deadline = min(deadline, time.monotonic() + LINGER_S)
        for rank in left:
            os.kill(rank.pid or 0, signal.SIGUSR2)  # print its stacks into the output
        _ended(left, time.monotonic() + 0.5)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    codes = [rank.exitcode or 0 for rank in ranks]
    dead = sum(rank.exitcode == -signal.SIGKILL for rank in ranks if rank not in left)
    return RunResult(folder, codes, time.monotonic() - began, dead)


def _rank(setup: Setup, rank: int, root: Path, folder: Path, kill: Kill | None) -> None:
    output = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    torch.set_num_threads(1)
    train(setup, rank, root, folder, kill)


def _ended(ranks: Sequence[BaseProcess], deadline: float) -> bool:
    """Wait until the first of them has ended, until the deadline; return whether one has."""
    return bool(wait([rank.sentinel for rank in ranks], max(0.0, deadline - time.monotonic())))


# -- chains


class Matrix:
    """Runs kills and appends what each left to ``results``."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder = folder / "root", folder / "shown"
        self.results: list[tuple[Kill, int]] = []  # each kill, and the newest step that it left
        self.runs = 1
        for setup in SETUPS:  # import here what the ranks would import, each for itself
            find("storage", setup.storage).load()
            find("stager", setup.stager).load()
        self.expected = run(SETUPS[0], folder / "expected", folder / "shown-expected")
        if self.expected.codes != [0] * RANKS:
            raise Broken(f"The uninterrupted run failed.\n{self.expected.output()}")

    def chain(self, setup: Setup, kills: Sequence[Kill]) -> None:
        """Kill run after run in one directory, then go on to the end.

        A kill that does not come about, since the run ends before, is tried again earlier, in a new directory.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        for kill in kills:
            for _ in range(ATTEMPTS):
                if self._run(setup, kill):
                    break
                shutil.rmtree(self.root)
                kill = replace(kill, nth=1, moment=kill.moment / 2)
            else:
                raise Broken(f"{setup}: {kill} did not come about")
        self._run(setup, None)

    def _run(self, setup: Setup, kill: Kill | None) -> bool:
        """Run once and check what is left; return whether the kill came about. The run went on to the end if not."""
        before = newest(self.root)
        shown = run(setup, self.root, self.folder, kill, self.expected.seconds)
        self.runs += 1
        try:
            self._check_resumed(shown, before)
            self._check_directory(max(before, shown.committed()))
            if kill is None or shown.dead == 0:
                self._check_end(shown)
                return False
            if shown.dead != RANKS and kill.victim == ALL and kill.when != RANDOM:
                raise Broken(f"ranks ended with {shown.codes}")
        except Broken as broken:
            raise Broken(f"{setup}, {kill}: {broken}\n{shown.output()}") from None
        self.results.append((kill, newest(self.root)))
        return True

    def _check_resumed(self, shown: RunResult, before: int) -> None:
        for rank in range(RANKS):
            for step, found in shown.states(rank)[:1]:
                if step != before:
                    raise Broken(f"rank {rank} went on from step {step}, and the newest checkpoint is of {before}")
                if found != dict(self.expected.states(rank))[step]:
                    raise Broken(f"rank {rank} got another state back than the one of step {step}")

    def _check_directory(self, committed: int) -> None:
        store = open_store(str(self.root))
        complete, refused = store.checkpoints()
        if refused:
            raise Broken(f"step directories that are no checkpoints: {refused}")
        damaged = {one.path: str(found) for one in complete if (found := store.look(one.path, content=True)).damages}
        if damaged:
            raise Broken(f"damaged: {damaged}")
        if newest(self.root) < committed:
            raise Broken(f"step {committed} was committed, and the newest is {newest(self.root)}")
        if os.path.lexists(self.root / "latest") and store.latest() is None:
            raise Broken("latest points to what is no checkpoint")

    def _check_end(self, shown: RunResult) -> None:
        if shown.codes != [0] * RANKS:
            raise Broken(f"ranks ended with {shown.codes}, and none was killed")
        for rank in range(RANKS):
            if shown.states(rank)[-1] != self.expected.states(rank)[-1]:
                raise Broken(f"rank {rank} ended with another state than the uninterrupted run")
        no_name = r"\.|step-\d+\." if shown.committed() else r"\."  # the plain one is back with the next commit
        # A reader that was killed before it wrote its lease leaves an empty file, which counts as a lease for a minute.
        files = [each for each in os.scandir(self.root) if not each.name.startswith(".reading.") or each.stat().st_size]
        hidden = [each.name for each in files if re.match(no_name, each.name)]
        latest = open_store(str(self.root)).latest()
        if hidden or newest(self.root) != STEPS or latest is None or latest.manifest.step != STEPS:
            raise Broken(f"{hidden} were left, the newest step is {newest(self.root)}, and latest is {latest}")
        if lost := KEPT - {one.manifest.step for one in open_store(str(self.root)).checkpoints()[0]}:
            raise Broken(f"steps {lost} were to be kept")


def newest(root: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 without one."""
    complete, _ = open_store(str(root)).checkpoints()
    return complete[0].manifest.step if complete else 0


# -- which kills


def at_point(draw: random.Random, victim: str, when: str) -> Kill:
    """A kill at a point: by a rank that comes there, the first or the second time."""
    rank = 0 if when in BY_RANK_0 else draw.randrange(RANKS)
    return Kill(victim, when, rank, 1 if when in START else draw.choice((1, 2)))


def plan(draw: random.Random, count: int, few: bool) -> list[tuple[Setup, list[Kill]]]:
    """Return chains of at least ``count`` kills.

    Each point once, or else for each victim under each setup; random moments for the rest.
    """
    chains: list[tuple[Setup, list[Kill]]] = []
    for i, setup in enumerate(SETUPS):
        if few:
            kills = [at_point(draw, draw.choice((ONE, ALL)), name) for name in NAMED[i :: len(SETUPS)]]
        else:
            kills = [at_point(draw, victim, name) for victim in (ONE, ALL) for name in NAMED]
        for _ in range(len(kills), -(-count // len(SETUPS))):
            kills.append(Kill(draw.choice((ONE, ALL)), RANDOM, draw.randrange(RANKS), moment=draw.random()))
        draw.shuffle(kills)
        chains += [(setup, kills[at : at + CHAIN]) for at in range(0, len(kills), CHAIN)]
    return chains


# -- the results


def counts(results: Sequence[tuple[Kill, int]]) -> list[list[str]]:
    """Rows of the table: each point, all random moments, all kills."""
    rows = []
    for when in (*NAMED, RANDOM, "all"):
        these = [(kill.victim, left) for kill, left in results if when in (kill.when, "all")]
        victims = [sum(killed == victim for killed, _ in these) for victim in (ONE, ALL)]
        nothing = sum(left == 0 for _, left in these)
        rows.append([when, *map(str, [*victims, len(these), len(these) - nothing, nothing])])
    return rows


def main() -> int:
    """Run the matrix and print its counts; the status is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--few", action="store_true", help="each point once, not once under each setup")
    parser.add_argument("--seed", type=int, default=0, help="of the kills that are drawn")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stagereg-kills-") as folder:
        matrix = Matrix(Path(folder))
        failure = None
        try:
            for setup, kills in plan(random.Random(asked.seed), asked.kills, asked.few):
                matrix.chain(setup, kills)
        except Broken as broken:
            failure = str(broken)
    output.table("", ["killed at", ONE, ALL, "kills", "resumed", "from the start"], counts(matrix.results))
    print(f"{len(matrix.results)} kills, {matrix.runs} runs, {time.monotonic() - began:.0f} s, seed {asked.seed}")
    if failure is not None:
        print(f"\nLOST: {failure}", file=sys.stderr)
        return 1
    print("Every run went on from the newest complete checkpoint, bit for bit, and ended as the uninterrupted one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
