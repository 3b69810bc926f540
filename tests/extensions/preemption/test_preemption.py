"""A run that receives SIGTERM or SIGUSR1.

All ranks save the same step and exit, and the next run ends as an uninterrupted one does.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.base.shutdown as shutdown
import stagereg.extensions.preemption.consensus as preemption_consensus
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import Preempted, Stopped
from stagereg.testing import run_ranks

from ...support.forks import run_forked

LIMIT_S = 100
STEPS = 40
LENGTHS = (STEPS, 6)
"""Steps that each rank has data for."""
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1

CASES = {
    "the first step": ("iterate", {1: (1, TERM)}),
    "all, at different steps, by different signals": ("iterate", {0: (5, TERM), 1: (3, USR1)}),
    "the rank without data": ("iterate", {1: (20, TERM)}),
    "the rank that has left the loop": ("leave", {1: (20, USR1)}),
    "a rank with data, while the other has none": ("iterate", {0: (20, TERM)}),
    "a rank with data, while the other has left the loop": ("leave", {0: (20, TERM)}),
}


class Training:
    """A small model on uneven data, which depends on nothing but the steps."""

    def __init__(self, rank: int, how: str) -> None:
        torch.manual_seed(0)
        self.rank, self.how = rank, how
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.steps = 0
        # Of this rank with data or without: counted where its optimizer steps.
        self.optimizer.register_step_post_hook(self._count)
        self.signals: dict[int, tuple[int, signal.Signals]] = {}

    def _count(self, *_: Any) -> None:
        self.steps += 1
        at, number = self.signals.get(self.rank, (0, TERM))
        if self.steps == at:
            os.kill(os.getpid(), number)

    def batches(self, start: int) -> Iterator[Tensor]:
        for step in range(start, LENGTHS[self.rank]):
            yield torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * self.rank + step))

    def run(self, checkpointer: Checkpointer) -> None:
        self.steps = start = checkpointer.restore(self.state) or 0
        if self.how == "iterate":
            with stagereg.Join([self.model, self.optimizer]) as join:
                for step, batch in enumerate(join.iterate(self.batches(start)), start + 1):
                    self.step(join.mean(self.model(batch).square().sum(), len(batch)))
                    checkpointer.maybe_save(step, self.state)
        else:
            with stagereg.Join([self.model, self.optimizer]):
                for step, batch in enumerate(self.batches(start), start + 1):
                    self.step(self.model(batch).square().mean())
                    checkpointer.maybe_save(step, self.state)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.parameters()]


def everything(rank: int, world: int, root: str) -> dict[str, Any]:
    preemption_consensus._EVERY_S = 0.0
    expected = {}
    for how in ("iterate", "leave"):
        training = Training(rank, how)
        with Checkpointer(f"{root}/{how}", every=1000) as checkpointer:
            training.run(checkpointer)
        expected[how] = training.parameters()
    seen: dict[str, Any] = {}
    base, ended = _get_default_store(), []  # kept, else the collector waits for what was never answered
    for name, (how, signals) in CASES.items():
        training = Training(rank, how)
        training.signals = signals
        left = None
        try:
            with Checkpointer(f"{root}/{name}", every=1000) as checkpointer:
                training.run(checkpointer)
        except Preempted as error:
            left = error
        ended.append(dist.group.WORLD)  # a loop that ranks were leaving has let it have calls of only some of them
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(name, base), rank=rank, world_size=world)
        resumed = Training(rank, how)
        with Checkpointer(f"{root}/{name}", every=1000) as checkpointer:
            resumed.run(checkpointer)
        seen[name] = {
            "left": left and (left.step, left.code),
            "steps": training.steps,
            "restored": [signal.getsignal(number) for number in (TERM, USR1)],
            "same": all(map(torch.equal, resumed.parameters(), expected[how])),
        }
    seen["under way"] = while_a_save_is_under_way(rank, f"{root}/under way")
    seen["uneven"] = uneven_calls(rank, f"{root}/uneven")
    seen["slow"] = steps_that_take_long(rank, f"{root}/slow")
    seen["planned"] = uneven_calls_and_a_plan(rank, f"{root}/planned")
    return seen


def while_a_save_is_under_way(rank: int, directory: str) -> Any:
    """The signal comes while an earlier save is being committed."""
    signalled = threading.Event()
    publish = CheckpointStore.publish

    def late(self: CheckpointStore, *given: Any) -> str:
        assert signalled.wait(LIMIT_S)
        return publish(self, *given)

    state = {"x": torch.zeros(3)}
    with mock.patch.object(CheckpointStore, "publish", late):
        try:
            with Checkpointer(directory, every=5) as checkpointer:
                for step in range(1, STEPS):
                    state["x"] += 1
                    if step == 7:
                        os.kill(os.getpid(), TERM)
                        signalled.set()
                    checkpointer.maybe_save(step, state)
        except Preempted as left:
            return left.step, sorted(path.name for path in Path(directory).glob("step-*"))


@contextmanager
def warnings_of(logger: logging.Logger) -> Iterator[list[str]]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield logged
    logger.removeHandler(handler)


def uneven_calls(rank: int, directory: str) -> Any:
    """One rank makes no more calls: no rank hangs, and the signal handlers are put back."""
    with mock.patch.object(preemption_consensus, "_PATIENCE_S", 0.2), warnings_of(preemption_consensus._log) as logged:
        checkpointer = Checkpointer(directory, every=1000)
        for step in range(1, 10 if rank == 1 else 30):
            checkpointer.maybe_save(step, {})
        free = signal.getsignal(TERM) is signal.SIG_DFL
        dist.barrier()
        checkpointer.close()
        return len(logged), "could not exchange" in "".join(logged), free


def uneven_calls_and_a_plan(rank: int, directory: str) -> Any:
    """The exchanges for ``every="auto"`` are never mixed up with those for preemption, which ranks call unevenly."""
    with (
        mock.patch.object(preemption_consensus, "_PATIENCE_S", 1.0),
        Checkpointer(directory, every="auto", stager=stagereg.build("stager", "blocking")) as checkpointer,
    ):
        for step in range(1, 31):
            for _ in range(1 + 2 * rank):
                checkpointer.should_save(step)
            if step % 5 == 0:
                checkpointer.save(step, {"step": step})
        checkpointer.wait()
        return checkpointer.stats.saves


def steps_that_take_long(rank: int, directory: str) -> int | None:
    """The signal comes in a step that is as long as the ranks are to wait: the next step is the last."""
    try:
        with (
            mock.patch.object(preemption_consensus, "_EVERY_S", 0.0),
            Checkpointer(directory, every=1000) as checkpointer,
        ):
            for step in range(1, STEPS):
                if step == 8 and rank == 1:
                    os.kill(os.getpid(), TERM)
                    while not any(checkpointer.preemption.signal_flags()):
                        time.sleep(0.001)
                checkpointer.maybe_save(step, {"step": step})
    except Preempted as left:
        return left.step
    return None


def test_all_ranks_save_the_same_step_and_resume_bit_for_bit(tmp_path: Path) -> None:
    first, second = run_ranks(everything, 2, args=(str(tmp_path),), timeout_s=LIMIT_S)
    for name, (_, signals) in CASES.items():
        step = first[name]["steps"]
        assert min(at for at, _ in signals.values()) <= step < STEPS, name
        left = {"left": (step, 75), "steps": step, "restored": [signal.SIG_DFL] * 2, "same": True}
        assert first[name] == second[name] == left, name
    step, names = first["under way"]
    assert second["under way"] == first["under way"]
    assert names == ["step-00000005", f"step-{step:08}"]
    assert first["uneven"] == (1, True, True)
    assert first["slow"] == second["slow"] == 9
    assert first["planned"] == second["planned"] == 6


# One import of torch, then a child for each case, forked before torch has run any thread; they wait at the same time.
SCRIPT = """
import ctypes, datetime, faulthandler, json, os, signal, sys, threading, time
import torch
import stagereg.extensions.preemption.signals as preemption
from stagereg.assembly import Checkpointer, Preemption
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
publish = CheckpointStore.publish
mutex = ctypes.create_string_buffer(256)

def hang():
    libc = ctypes.CDLL(None)  # waits where no handler of Python's can run
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def me(number):
    os.kill(os.getpid(), number)

def opened(name, grace_s=1000, **options):
    grace = grace_s and datetime.timedelta(seconds=grace_s)
    return Checkpointer(os.path.join(sys.argv[1], name), preemption=Preemption(grace_period=grace), **options)

def on(checkpointer):
    for step in range(1, 10**6):
        checkpointer.maybe_save(step, {})

def until_seen(checkpointer):
    while checkpointer.preemption.signal_flags() != [1.0, 0.0]:
        time.sleep(0.001)

def train(case, grace_s=0.3, every=5, **options):
    def broken(self, written, manifest, keep):
        step = manifest.step
        if step == 7 and case.startswith("save hangs"):
            threading.Event().wait()
        if step == 7 and case in ("save fails, warned", "first save fails"):
            raise OSError("no cheese")
        return publish(self, written, manifest, keep)
    CheckpointStore.publish = broken
    with opened(case, grace_s, every=every, **options) as checkpointer:
        for step in range(1, 100):
            if step == 7:
                checkpointer.wait()
                me(TERM)
                until_seen(checkpointer)
            checkpointer.maybe_save(step, {"step": step})

def twice():
    preemption.SAME_SIGNAL_S = 0.0
    with opened("twice") as checkpointer:
        me(TERM)
        until_seen(checkpointer)
        me(TERM)
        hang()

def at_once():
    with opened("at once") as checkpointer:
        me(TERM)
        me(TERM)
        on(checkpointer)

def many_while_it_ends():
    with opened("many") as checkpointer:
        me(TERM)
        try:
            on(checkpointer)
        except SystemExit:
            checkpointer.close()
            me(TERM)
            me(USR1)
            child = os.fork()
            if child == 0:
                me(USR1)
                me(TERM)
            assert os.waitpid(child, 0)[1] == TERM
            raise

def signal_on_another_rank():
    checkpointer = opened("another rank", 0.3)
    checkpointer.preemption._update([1.0, 0.0])
    hang()

def closed():
    opened("closed").close()
    me(USR1)

def dropped():
    opened("dropped")
    import gc
    gc.collect()
    me(TERM)

def without():
    with opened("without", None):
        me(TERM)

def too_late():
    with opened("too late", 0.3) as checkpointer:
        checkpointer.maybe_save(1, {})
        me(TERM)
    hang()  # as if it had something else to do now

def worker():
    begun, go = threading.Event(), threading.Event()
    def slow(*given):
        begun.set()
        go.wait()
        return publish(*given)
    CheckpointStore.publish = slow
    with opened("worker", every=1) as checkpointer:
        checkpointer.maybe_save(1, {"x": 1})
        begun.wait()
        child = os.fork()
        if child == 0:
            try:
                checkpointer.maybe_save(2, {"x": 2})
            except CheckpointError as error:
                assert "A forked child" in str(error)
                checkpointer.close()
                me(USR1)
                me(TERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == TERM, "a forked child receives only SIGTERM"
        assert checkpointer.preemption.signal_flags() == [0.0, 0.0]
        go.set()
        checkpointer.maybe_save(2, {"x": 2})
    assert checkpointer.stats.saves == 2

def kept():
    received = []
    signal.signal(USR1, lambda *_: received.append(1))
    with opened("kept") as checkpointer:
        me(USR1)
        assert received and checkpointer.preemption.signal_flags() == [0.0, 0.0]
        later = signal.signal(TERM, lambda *_: received.append(1)) and signal.getsignal(TERM)
    assert signal.getsignal(USR1) is not signal.SIG_DFL
    assert signal.getsignal(TERM) is later

def dumped():
    faulthandler.register(USR1)
    with opened("dumped") as checkpointer:
        me(USR1)
        assert checkpointer.preemption.signal_flags() == [0.0, 0.0]
    me(USR1)

def two():
    one, other = opened("two"), opened("two more")
    one.close()
    me(TERM)
    on(other)

cases = {"save hangs": lambda: train("save hangs")}
cases["first save fails"] = lambda: train("first save fails", 1000, every=1000)
cases["save fails, warned"] = lambda: train("save fails, warned", 1000, failure=Failure(on_error="warn"))
three = Failure(timeout=datetime.timedelta(seconds=3))
cases["save hangs past its time-out"] = lambda: train("save hangs late", 1000, failure=three)
cases["too late"] = too_late
cases |= {"twice": twice, "at once": at_once, "closed": closed, "dropped": dropped, "without": without}
cases |= {"worker": worker, "kept": kept, "dumped": dumped, "two": two}
cases |= {"many": many_while_it_ends, "another rank": signal_on_another_rank}
children = {}
for name, case in cases.items():
    output = os.path.join(sys.argv[1], f"{name}.txt")
    children[name] = os.fork()
    if children[name] == 0:
        signal.alarm(60)
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        try:
            case()
            os._exit(0)
        except SystemExit as left:
            if name in ("save fails, warned", "save hangs past its time-out"):
                raise  # and run what runs at the end of a process
            os._exit(left.code)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}))
"""


def test_a_preempted_process_has_ended_when_its_grace_is_over(tmp_path: Path) -> None:
    ended = run_forked(SCRIPT, tmp_path, timeout_s=LIMIT_S, ignores_warnings=True)
    codes = json.loads(ended.stdout)
    seen = {name: Path(tmp_path, f"{name}.txt").read_text() for name in codes}
    ended_by_grace = ["save hangs", "too late", "twice", "another rank"]
    not_saved = ["first save fails", "save fails, warned", "save hangs past its time-out"]
    expected = dict.fromkeys([*ended_by_grace, *not_saved], 143) | dict.fromkeys(["worker", "kept", "dumped"], 0)
    expected |= dict.fromkeys(["at once", "two", "many"], 75)
    expected |= {"closed": -signal.SIGUSR1, "dropped": -signal.SIGTERM, "without": -signal.SIGTERM}
    assert codes == expected, (ended.stderr, seen)
    assert seen["first save fails"].count("no complete checkpoint") == 1
    assert seen["dumped"].count("Current thread") == 2
    few = r"the save did not finish within the grace period of 0\.3 s"
    for name, text in {
        "save hangs": rf"{few} \(Preemption\(.*\)\)\. The newest valid checkpoint is step 5",
        "too late": few,
        "another rank": few,
        "save fails, warned": "Step 7 was not saved.* no cheese.*newest.* step 5",
        "save hangs past its time-out": "Step 7 was not saved: it took longer than 3 s",
        "twice": "the signal arrived twice, so the save was aborted",
    }.items():
        assert re.search(f"stopped by SIGTERM: {text}", seen[name], re.MULTILINE), seen[name]


@pytest.mark.parametrize("left", [Preempted(7, "runs/x", TERM), Stopped(USR1, "the disk is full")])
def test_the_exceptions_that_end_a_run_survive_a_pickle(left: SystemExit) -> None:
    copy = pickle.loads(pickle.dumps(left))
    assert (type(copy), str(copy), copy.code) == (type(left), str(left), left.code)


@pytest.fixture
def signals_after() -> Iterator[None]:
    """Handle signals as before: a process that was preempted and has saved ignores them for good."""
    yield
    for number in (TERM, USR1):
        signal.signal(number, signal.SIG_DFL)
    shutdown._forget()


@pytest.mark.usefixtures("signals_after")
@pytest.mark.parametrize(("resume", "told"), [("auto", False), ("never", True), ("PATH", True)])
def test_a_preempted_run_names_the_option_unless_the_same_command_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str, told: bool
) -> None:
    state = {"x": torch.zeros(3)}
    with Checkpointer(tmp_path / "before") as checkpointer:
        checkpointer.save(1, state)
    named = str(tmp_path / "before" / "step-00000001") if resume == "PATH" else resume
    with pytest.raises(Preempted), Checkpointer(tmp_path / "run", resume=named) as checkpointer:  # noqa: PT012
        checkpointer.restore(state)
        signal.raise_signal(signal.SIGTERM)
        checkpointer.maybe_save(2, state)
    [text] = [each.getMessage() for each in caplog.records if "preempted" in each.getMessage()]
    how = ' To resume, start the run with resume="auto".'
    assert text.endswith(f"step 2 is saved in {tmp_path}/run.{how * told}")
