"""Kills training runs, starts them again, and checks what is left: `python tests/checkpoint/kills/matrix.py`.

A chain is one directory of checkpoints and several kills: a run is killed, the next one goes on from what is there and
is killed itself, and the last one goes on to the end. After each kill it is checked that every step directory is a
complete checkpoint, that none is older than what a rank knew to be committed, and that the next run takes up the newest
one with parameters, optimizer, scheduler and random numbers, on each rank, equal bit for bit to those that an
uninterrupted run had at that step. The end of the chain must equal the end of the uninterrupted run.

The program imports torch once and forks the ranks before torch has run any thread. Every wait is bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from observer import ALL, ONE, RANDOM, WRITER, Kill, Observer, append_line

import stagereg
import stagereg.checkpoint.failpoints as failpoints
from stagereg import output
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.store.open_store import open_store
from stagereg.registry import find

STEPS, EVERY, WIDTH = 10, 2, 256
LIMIT_S = 300.0  # of one run; nothing here takes a tenth of it on an idle machine, but writers give way to others
LINGER_S = 2.0  # for the other ranks to notice, which is no promise; a launcher would end them as well
ATTEMPTS = 4
BY_RANK_0 = {"locked", "swept", *list(failpoints.POINTS)[list(failpoints.POINTS).index("marked") :]} - {"ended"}
START = {"locked", "swept"}


@dataclass(frozen=True)
class Setup:
    """What runs."""

    storage: str = "dcp"
    stager: str = "blocking"
    ranks: int = 2


CHEAP = [Setup(storage, stager) for stager in ("blocking", "pinned_cached") for storage in ("dcp", "safetensors")]
SHARED = [Setup(storage, "shared") for storage in ("dcp", "safetensors")]


# -- in a rank


def train(setup: Setup, rank: int, root: Path, folder: Path, kills: Sequence[Kill]) -> None:
    """Train; deterministic as long as the random numbers are."""
    observer = Observer(kills, rank, folder, os.getpid())
    if setup.ranks > 1:
        store = f"file://{folder / 'rendezvous'}"
        limit = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=setup.ranks, timeout=limit)
    torch.manual_seed(rank)
    random.seed(rank)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    if setup.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    own = f"drawn.rank{rank}"
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, own: 0.0}
    storage = stagereg.build("storage", setup.storage)
    storage.observer = observer
    failpoints.watch(observer)
    with Checkpointer(str(root), EVERY, 2, "auto", stagereg.build("stager", setup.stager), storage) as checkpointer:
        observer.checkpointer = checkpointer
        start = checkpointer.restore(state) or 0
        append_line(folder, rank, resumed=start, digest=digest(state))
        for step in range(start + 1, STEPS + 1):
            state[own] += random.random()
            loss = model(torch.randn(4, WIDTH)).square().mean() * random.random()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            append_line(folder, rank, step=step, digest=digest(state))
            checkpointer.maybe_save(step, state)
    append_line(folder, rank, end=digest(state))
    if setup.ranks > 1:
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


@dataclass
class RunResult:
    """What the ranks of one run reported, and how they ended."""

    folder: Path
    ranks: int
    codes: list[int]
    seconds: float
    ended: int  # ranks that had to be ended, since they had not noticed

    def lines(self, rank: int) -> list[dict[str, Any]]:
        file = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def of(self, rank: int, key: str) -> list[Any]:
        return [line[key] for line in self.lines(rank) if key in line]

    def resumed(self, rank: int) -> tuple[int, str] | None:
        return next(((line["resumed"], line["digest"]) for line in self.lines(rank) if "resumed" in line), None)

    def digests(self, rank: int) -> dict[int, str]:
        return {line["step"]: line["digest"] for line in self.lines(rank) if "step" in line}

    def killed(self, i: int) -> bool:
        """Whether the kill of that number came about."""
        return (self.folder / f"killed-{i}").exists()

    def committed(self) -> int:
        """The step of the last save that rank 0 has reported as durable."""
        start = self.resumed(0)
        count = self.of(0, "point").count("committed")
        return 0 if start is None or count == 0 else start[0] - start[0] % EVERY + EVERY * count

    def output(self) -> str:
        texts = [(self.folder / f"rank{rank}.out").read_text(errors="replace")[-3000:] for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank}, {self.codes[rank]}:\n{text}" for rank, text in enumerate(texts))


def run(setup: Setup, root: Path, folder: Path, kills: Sequence[Kill] = (), full: float = 0) -> RunResult:
    """Run the ranks, killing as asked, until all have ended.

    ``full`` is how many seconds an uninterrupted run takes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    pids: list[int] = []
    for rank in range(setup.ranks):
        pids.append(_forked(rank, pids, folder, lambda rank=rank: train(setup, rank, root, folder, kills)))
    pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    try:
        for i, kill in enumerate(kills):
            if kill.when == RANDOM and not _one_ended(pidfds, began + kill.moment * full):
                while kill.victim == WRITER and not _children(pids[kill.rank]):
                    if _one_ended(pidfds, time.monotonic() + 0.01):  # until the writer is there
                        break
                _kill_now(kill, pids, folder / f"killed-{i}")
        deadline = began + LIMIT_S
        while left := _running(pidfds):
            if not select.select(left, [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            deadline = min(deadline, time.monotonic() + LINGER_S) if _killed(pidfds) else deadline
        late = [pidfds[descriptor] for descriptor in _running(pidfds)]
        for descriptor in _running(pidfds):
            signal.pidfd_send_signal(descriptor, signal.SIGUSR2)  # print its stacks into the output
        select.select(_running(pidfds), [], [], 0.5 if late else 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for descriptor in pidfds:
            os.close(descriptor)
    if codes == [0] * setup.ranks:  # a kill at a random moment came after the end
        for i, kill in enumerate(kills):
            if kill.when == RANDOM and kill.victim != WRITER:
                (folder / f"killed-{i}").unlink(missing_ok=True)
    ended = sum(codes[rank] == -signal.SIGKILL for rank in late)  # the others were just about to end by themselves
    return RunResult(folder, setup.ranks, codes, time.monotonic() - began, ended)


def _forked(rank: int, before: Sequence[int], folder: Path, act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        os.setpgid(pid, before[0] if before else pid)
        return pid
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, before[0] if before else 0)
        output = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        torch.set_num_threads(1)
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _running(pidfds: Iterable[int]) -> list[int]:
    pidfds = list(pidfds)
    ended = select.select(pidfds, [], [], 0)[0]
    return [descriptor for descriptor in pidfds if descriptor not in ended]


def _killed(pidfds: dict[int, int]) -> bool:
    return len(_running(pidfds)) < len(pidfds)


def _one_ended(pidfds: dict[int, int], deadline: float) -> bool:
    """Wait until the deadline, at most until the first rank has ended; return whether one has."""
    return bool(select.select(list(pidfds), [], [], max(0.0, deadline - time.monotonic()))[0])


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill_now(kill: Kill, pids: Sequence[int], flag: Path) -> None:
    if kill.victim == WRITER:
        children = _children(pids[kill.rank])
        if not children:
            return
        os.kill(children[0], signal.SIGKILL)
    elif kill.victim == ONE:
        os.kill(pids[kill.rank], signal.SIGKILL)
    else:
        os.killpg(pids[0], signal.SIGKILL)
    flag.touch()


# -- chains


def preload() -> None:
    """Import what the ranks would import, each for itself."""
    for setup in (*CHEAP, *SHARED):
        find("storage", setup.storage).load()
        find("stager", setup.stager).load()


class Broken(Exception):
    """Something was lost; reports what, and the output of the ranks."""


@dataclass(frozen=True)
class KillResult:
    """What one kill left."""

    setup: Setup
    kill: Kill
    newest: int


class Matrix:
    """Runs kills and appends what each left to ``results``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)
        self.results: list[KillResult] = []
        preload()
        self.reached: Counter[str] = Counter()
        self.runs = 0
        self._expected: dict[int, RunResult] = {}
        self._seconds: dict[tuple[bool, int], float] = {}

    def expected(self, ranks: int) -> RunResult:
        """The uninterrupted run of that many ranks."""
        if ranks not in self._expected:
            shown = run(Setup(ranks=ranks), self.folder / f"expected{ranks}", self.folder / f"expected-lines{ranks}")
            if shown.codes != [0] * ranks:
                raise Broken(f"The uninterrupted run failed.\n{shown.output()}")
            self._expected[ranks] = shown
            self.runs += 1
        return self._expected[ranks]

    def chain(self, setup: Setup, kills: Sequence[Sequence[Kill]]) -> list[Kill]:
        """Kill run after run in one directory, then go on to the end; return the kills that did not come about.

        Each of ``kills`` is what happens to one run: one kill, or several of its writer processes.
        """
        root = self.folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        missed: list[Kill] = []
        for planned in kills:
            shown = self._run(setup, root, planned)
            missed += [kill for i, kill in enumerate(planned) if not shown.killed(i)]
            if shown.codes == [0] * setup.ranks:
                self._check_end(setup, root, shown)
        if shown.codes != [0] * setup.ranks:
            self._check_end(setup, root, self._run(setup, root, []))
        return missed

    def duration(self, setup: Setup) -> float:
        """How many seconds an uninterrupted run takes, with a writer process or without."""
        key = setup.stager == "shared", setup.ranks
        if key not in self._seconds:
            root = self.folder / "measured"
            self.expected(setup.ranks)
            shown = self._run(setup, root, [])
            self._check_end(setup, root, shown)
            shutil.rmtree(root)
            self._seconds[key] = shown.seconds
        return self._seconds[key]

    def _run(self, setup: Setup, root: Path, kills: Sequence[Kill]) -> RunResult:
        before = newest(root)
        full = self.duration(setup) if any(kill.when == RANDOM for kill in kills) else 0.0
        self.expected(setup.ranks)
        # A folder for each: a writer process that outlives its rank for a moment still reports to its own.
        shown = run(setup, root, self.folder / f"shown-{self.runs}", kills, full)
        self.runs += 1
        self.reached.update(name for rank in range(setup.ranks) for name in shown.of(rank, "point"))
        with self._naming(setup, kills, shown):
            self._check_resumed(setup, shown, before)
            fatal = [kill for i, kill in enumerate(kills) if kill.victim != WRITER and shown.killed(i)]
            if not fatal and shown.codes != [0] * setup.ranks:
                raise Broken(f"ranks ended with {shown.codes}, and none was killed")
            if fatal and shown.codes.count(-signal.SIGKILL) - shown.ended < (
                setup.ranks if fatal[0].victim == ALL and fatal[0].when != RANDOM else 1
            ):
                raise Broken(f"ranks ended with {shown.codes}")
            self._check_directory(setup, root, shown, before)
        for i, kill in enumerate(kills):
            if shown.killed(i):
                self.results.append(KillResult(setup, kill, newest(root)))
        return shown

    @contextlib.contextmanager
    def _naming(self, setup: Setup, kills: Sequence[Kill], shown: RunResult) -> Iterator[None]:
        try:
            yield
        except Broken as broken:
            raise Broken(f"{setup}, {list(kills)}: {broken}\n{shown.output()}") from None

    def _check_resumed(self, setup: Setup, shown: RunResult, before: int) -> None:
        expected = self.expected(setup.ranks)
        for rank in range(setup.ranks):
            resumed = shown.resumed(rank)
            if resumed is None:
                continue
            step, found = resumed
            if step != before:
                raise Broken(f"rank {rank} went on from step {step}, and the newest complete checkpoint is of {before}")
            wanted = expected.digests(rank)[step] if step else (expected.resumed(rank) or (0, ""))[1]
            if found != wanted:
                raise Broken(f"rank {rank} got another state back than the one of step {step}")

    def _check_directory(self, setup: Setup, root: Path, shown: RunResult, before: int) -> None:
        store = open_store(str(root))
        complete, others = store.checkpoints()
        if others:
            raise Broken(f"step directories that are no checkpoints: {others}")
        damaged = {one.path: str(found) for one in complete if (found := store.examine(one.path)).damages}
        if damaged:
            raise Broken(f"damaged: {damaged}")
        if newest(root) < max(before, shown.committed()):
            raise Broken(f"step {max(before, shown.committed())} was committed, and the newest is {newest(root)}")
        if os.path.lexists(root / "latest") and open_store(str(root)).latest() is None:
            raise Broken("latest points to what is no checkpoint")

    def _check_end(self, setup: Setup, root: Path, shown: RunResult) -> None:
        expected = self.expected(setup.ranks)
        with self._naming(setup, [], shown):
            for rank in range(setup.ranks):
                by_writer = any(line.get("writer") for line in shown.lines(rank))
                if setup.stager == "shared" and "written" in shown.of(rank, "point") and not by_writer:
                    raise Broken(f"rank {rank} wrote without its writer process")
                if shown.of(rank, "end") != expected.of(rank, "end"):
                    raise Broken(f"rank {rank} ended with another state than the uninterrupted run")
            hidden = [name for name in os.listdir(root) if name.startswith(".")]
            latest = open_store(str(root)).latest()
            if hidden or newest(root) != STEPS or latest is None or latest.manifest.step != STEPS:
                raise Broken(f"{hidden} were left, the newest step is {newest(root)}, and latest is {latest}")


def newest(root: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 without one."""
    complete, _ = open_store(str(root)).checkpoints()
    return complete[0].manifest.step if complete else 0


# -- which kills


def at_point(draw: random.Random, victim: str, when: str, ranks: int) -> Kill:
    """A kill at a point: by a rank that comes there, the first or the second time."""
    rank = 0 if when in BY_RANK_0 else draw.randrange(ranks)
    return Kill(victim, when, rank, 1 if when in START else draw.choice((1, 2)))


def at_random(draw: random.Random, victim: str, ranks: int) -> Kill:
    """A kill at a random moment of a run."""
    return Kill(victim, RANDOM, draw.randrange(ranks), moment=draw.random())


def few(draw: random.Random, kills: int) -> list[tuple[Setup, list[list[Kill]]]]:
    """Chains for a short run: each point once, writers of one run, and random moments for the rest of ``kills``."""
    named = list(failpoints.POINTS)
    single = [at_point(draw, draw.choice((ONE, ALL)), name, 2) for name in named]
    writers = [Kill(WRITER, draw.choice(("writing", "flushed", "marked")), nth=2)]
    count = kills - len(single) - len(writers)
    single += [at_random(draw, draw.choice((ONE, ALL)), 2) for _ in range(count)]
    draw.shuffle(single)
    setups = draw.sample(CHEAP, 4)
    chains = [(setup, [[kill] for kill in single[i::4]]) for i, setup in enumerate(setups)]
    return [*chains, (Setup("dcp", "shared", ranks=1), [writers])]


def many(draw: random.Random, kills: int) -> list[tuple[Setup, list[list[Kill]]]]:
    """Chains for a long run: ranks at each point under each setup, writers at each; random moments for the rest."""
    chains: list[tuple[Setup, list[list[Kill]]]] = []
    named = list(failpoints.POINTS)
    for setup in CHEAP:
        each = [at_point(draw, victim, name, 2) for victim in (ONE, ALL) for name in named]
        draw.shuffle(each)
        chains += [(setup, [[kill] for kill in each[i::8]]) for i in range(8)]
    each = [at_point(draw, victim, name, 2) for victim in (ONE, ALL) for name in named]
    each += [at_point(draw, WRITER, name, 2) for name in named if name not in START]
    draw.shuffle(each)  # a writer process takes seconds to start: these are shared out among the storages
    chains += [(SHARED[i % len(SHARED)], [[kill] for kill in each[i::9]]) for i in range(9)]
    count = max(0, kills - sum(len(planned) for _, chain in chains for planned in chain))
    for i in range(-(-count // 4)):
        setup = SHARED[i // 6 % len(SHARED)] if i % 6 == 5 else CHEAP[i % len(CHEAP)]
        victims = (ONE, ALL, WRITER) if setup.stager == "shared" else (ONE, ALL)
        chains.append((setup, [[at_random(draw, draw.choice(victims), 2)] for _ in range(4)]))
    return chains


def work_off(matrix: Matrix, chains: Sequence[tuple[Setup, list[list[Kill]]]]) -> None:
    """Run all chains; a kill that did not come about, since the run had ended before, is tried in a new directory."""
    for setup, kills in chains:
        missed = matrix.chain(setup, kills)
        for attempt in range(ATTEMPTS):
            if not missed:
                break
            earlier = [replace(kill, nth=1, moment=kill.moment / 2**attempt) for kill in missed]
            missed = matrix.chain(setup, [[kill] for kill in earlier])
        if missed:
            raise Broken(f"{setup}: {missed} did not come about")


# -- the results


def counts(results: Sequence[KillResult]) -> list[list[str]]:
    """Return the rows of the table: when, kills of each victim, and what the next run went on from."""
    rows = []
    for when in [*failpoints.POINTS, RANDOM, "all"]:
        these = [result for result in results if when in (result.kill.when, "all")]
        victims = [sum(result.kill.victim == victim for result in these) for victim in (ONE, ALL, WRITER)]
        nothing = sum(result.newest == 0 for result in these)
        rows.append([when, *map(str, [*victims, len(these), len(these) - nothing, nothing])])
    return rows


HEADS = ["killed at", ONE, ALL, WRITER, "kills", "resumed", "from the start"]


def main() -> int:
    """Run the matrix and print its counts; the status is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--few", action="store_true", help="each point once, not once under each setup")
    parser.add_argument("--seed", type=int, default=0, help="of the kills that are drawn")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stagereg-kills-") as folder:
        matrix = Matrix(Path(folder), asked.seed)
        failure = None
        try:
            work_off(matrix, (few if asked.few else many)(matrix.draw, asked.kills))
        except Broken as broken:
            failure = str(broken)
    output.table("", HEADS, counts(matrix.results))
    print(f"{len(matrix.results)} kills, {matrix.runs} runs, {time.monotonic() - began:.0f} s, seed {asked.seed}")
    if asked.json:
        shown = {
            "kills": len(matrix.results),
            "reached": sorted(matrix.reached),
            "heads": HEADS,
            "rows": counts(matrix.results),
        }
        asked.json.write_text(json.dumps(shown))
    if failure is not None:
        print(f"\nLOST: {failure}", file=sys.stderr)
        return 1
    print("Every run went on from the newest complete checkpoint, bit for bit, and ended as the uninterrupted one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
