"""A checkpoint that runs crash after is skipped, on any number of ranks; other ends and readers count for nothing."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.base.shutdown as shutdown
import stagereg.checkpoint.store.failpoints as failpoints
import stagereg.checkpoint.store.lock as lock
import stagereg.extensions.recovery.quarantine as quarantine
from stagereg.assembly import Checkpointer
from stagereg.base.command import command_key
from stagereg.base.option_text import in_config
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, Preempted, Stopped
from stagereg.extensions.recovery.crashes import crashes_in, is_in_order, is_out_of_memory
from stagereg.testing.ranks import RankFailure, run_ranks
from tests.checkpoint.promises.test_damaged import save, state_of

from ...support.forks import run_forked
from ...support.pages import Page

NOTE = ".restored.json"


def run_out(_: object = None) -> None:
    raise MemoryError  # counts, whoever has started the run


def crash(root: Path | str, act: Callable[[Checkpointer], object] = run_out, **options: Any) -> int | None:
    """A run that restores, acts and raises; return the step that it resumed from."""
    began = []

    def run() -> None:
        with Checkpointer(str(root), **options) as checkpointer:
            began.append(checkpointer.restore(state_of()))
            act(checkpointer)

    with pytest.raises((MemoryError, ZeroDivisionError, KeyboardInterrupt, SystemExit)):
        run()
    return began[0]


def known(root: Path | str) -> dict[str, str]:
    return {path.rpartition("/")[2]: str(each) for path, each in crashes_in(open_store(str(root))).items()}


def steps_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


@pytest.fixture(params=["path", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "path" else f"memory://bucket{tmp_path}/run"


def test_an_error_that_ends_a_job_whose_checkpointer_is_open_is_noted(tmp_path: Path) -> None:
    save(tmp_path, 100)
    checkpointer = Checkpointer(str(tmp_path), every=1000)
    assert checkpointer.restore(state_of()) == 100
    checkpointer.maybe_save(101, state_of())  # from now on the run has the lock
    assert b"step-00000100" in (tmp_path / NOTE).read_bytes(), "counts as a crash if the process is killed now"
    shutdown.note_failure(CheckpointError("Step 200 was not saved"))  # a process that exits at once closes nothing
    assert not (tmp_path / NOTE).exists()
    checkpointer.close()


def test_after_three_crashes_the_one_before_is_restored(root: str) -> None:
    save(root, 100, 200)
    assert [crash(root) for _ in range(3)] == [200, 200, 200]
    assert [each for name, each in known(root).items() if "200" in name] == ["quarantined after 3 crashes"]
    assert [crash(root) for _ in range(3)] == [100, 100, 100]
    with pytest.raises(CheckpointError) as refused, Checkpointer(root) as checkpointer:
        checkpointer.restore(state_of())
    for part in ("step-00000200", "step-00000100", "beyond step 200", "max_crashes=None", 'resume="never"'):
        assert part in str(refused.value)
    assert crash(root, restore=Restore(max_crashes=None)) == 200
    assert crash(root, restore=Restore(max_crashes=4)) == 200


def test_the_page_shows_what_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 200, 300)
    for _ in range(3):
        crash(tmp_path)
    caplog.clear()
    with in_config({"checkpoint": "checkpoint"}):  # as the page
        assert crash(tmp_path) == 200
    [shown] = [each for each in Page("guarantees.md").of("text") if "is quarantined and was skipped" in each]
    logged = "\n".join(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    assert logged.replace(str(tmp_path), "runs/gpt") == shown.strip()


def test_the_next_commit_makes_a_checkpoint_good_again(root: str) -> None:
    save(root, 100, 200)

    def commit(checkpointer: Checkpointer) -> None:
        checkpointer.save(300, state_of(300))
        checkpointer.wait()
        assert known(root) == {}
        run_out()

    assert [crash(root), crash(root), crash(root, commit)] == [200, 200, 200]
    assert known(root) == {}
    assert open_store(root).note(NOTE) == b""


def test_crashes_after_another_one_take_no_count_back(root: str) -> None:
    save(root, 100, 200)
    crash(root), crash(root)
    older = open_store(root).checkpoints()[0][1].path
    assert crash(root, resume=older) == 100
    assert [crash(root) for _ in range(2)] == [200, 100]


@pytest.mark.parametrize(
    "how", ["end", "close", "garbage", "Ctrl-C", "exit 0", "exit 1", "error", "preempted", "stopped", "refused"]
)
def test_an_end_in_good_order_is_no_crash(tmp_path: Path, how: str) -> None:
    save(tmp_path, 100)
    crash(tmp_path)
    ends: dict[str, BaseException] = {
        "Ctrl-C": KeyboardInterrupt(),
        "exit 0": SystemExit(0),
        "exit 1": SystemExit(1),
        "error": ZeroDivisionError(),  # of a program that a person starts
        "preempted": Preempted(100, str(tmp_path), signal.SIGTERM),
        "stopped": Stopped(signal.SIGTERM, "the disk is full"),
    }
    once = {"step-00000100": "1 crash after it was restored"}

    def end(_: object) -> None:
        assert known(tmp_path) == once, "the run is alive"
        raise ends[how]

    if how in ends:
        crash(tmp_path, end)
    else:
        checkpointer = Checkpointer(str(tmp_path))
        with pytest.raises(CheckpointError) if how == "refused" else nullcontext():
            checkpointer.restore({"y": 1} if how == "refused" else state_of())
        if how == "end":
            with checkpointer:
                pass
        elif how != "garbage":
            checkpointer.close()
        del checkpointer
    assert known(tmp_path) == once


def test_a_save_that_fails_is_no_crash_unless_a_rank_is_gone() -> None:
    full, gone = CheckpointError("Step 3 was not saved"), CheckpointError("Step 3 was not saved")
    full.__cause__, gone.__cause__ = OSError(28, "full"), RuntimeError("Connection closed by peer")
    assert is_in_order(full)
    assert not is_in_order(gone)
    assert not is_in_order(SystemExit(1))


def test_what_was_asked_for_is_restored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 100, 200)
    for _ in range(3):
        crash(tmp_path)
    for number, resume in enumerate(("latest", str(tmp_path / "step-00000200"), str(tmp_path / "latest"))):
        caplog.clear()
        assert crash(tmp_path, resume=resume) == 200
        said = [each.getMessage() for each in caplog.records if "option names it" in each.getMessage()]
        path = tmp_path / "step-00000200"
        end = f"is restored because the option names it, although it is quarantined after {3 + number} crashes."
        assert said == [f"{path} {end}"]
    with Checkpointer(str(tmp_path / "other")) as checkpointer:  # of another directory nothing is counted
        assert checkpointer.restore(state_of(), source=tmp_path) == 100
    assert known(tmp_path)["step-00000200"] == "quarantined after 6 crashes"


def test_retention_neither_counts_nor_deletes_a_quarantined_one(tmp_path: Path) -> None:
    save(tmp_path, 100, 200)
    for _ in range(3):
        crash(tmp_path)
    for number, step in ((0, 110), (110, 120)):
        with Checkpointer(str(tmp_path), keep=2) as checkpointer:
            assert checkpointer.restore(state_of()) == (number or 100)
            checkpointer.save(step, state_of(step))
            checkpointer.wait()
        assert "step-00000200" in steps_in(tmp_path)
        assert "step-00000100" in steps_in(tmp_path) or step == 120
    assert steps_in(tmp_path) == ["step-00000110", "step-00000120", "step-00000200"]
    assert known(tmp_path) == {"step-00000200": "quarantined after 3 crashes"}
    with Checkpointer(str(tmp_path), keep=2) as checkpointer:
        checkpointer.restore(state_of())
        checkpointer.save(200, state_of(200))
    assert [name.partition(".")[0] for name in steps_in(tmp_path)] == ["step-00000120", "step-00000200"]
    assert known(tmp_path) == {}, "it is another checkpoint of that step"


def test_a_step_that_a_run_saves_again_long_after_it_was_quarantined_is_another_checkpoint(root: str) -> None:
    def commit(*steps: int) -> Callable[[Checkpointer], None]:
        def act(checkpointer: Checkpointer) -> None:
            for step in steps:
                checkpointer.save(step, state_of(step))
                checkpointer.wait()
            run_out()

        return act

    save(root, 100, 200)
    assert [crash(root), crash(root), crash(root), crash(root, commit(210), keep=9)] == [200, 200, 200, 100]
    older = next(each.path for each in open_store(root).checkpoints()[0] if each.manifest.step == 100)
    assert crash(root, commit(110, 200), keep=9, resume=older) == 100
    assert [crash(root) for _ in range(4)] == [200, 200, 200, 110]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"crashes": 3}', b'{"crashes": {"a": "x"}}', b"\xff", b"[" * 9999])
def test_a_note_that_cannot_be_read_counts_nothing(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, 100)
    (tmp_path / NOTE).write_bytes(content)
    assert crash(tmp_path) == 100
    assert known(tmp_path) == {"step-00000100": "1 crash after it was restored"}


def test_a_note_that_cannot_be_written_keeps_nobody_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 100)

    def replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert crash(tmp_path) == 100
    assert "cannot write the record of crashes in" in caplog.text


class Poison:
    """Loads, and is then fatal on one rank."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, world: int, root: str, steps: int, kills: int | None, point: str) -> int:
    """Kill one rank while it loads, or at a moment of the first save after that; else return where the run began."""

    def observer(name: str) -> None:
        if (name, rank) == (point, kills):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.watch(observer)
    state = {**state_of(), "poison": Poison(rank == kills and point == "load")}
    with Checkpointer(root, every=1, keep=9) as checkpointer:
        start = checkpointer.restore(state) or 0
        x = torch.ones(1)
        for step in range(start + 1, steps + 1):
            dist.all_reduce(x)
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
    return start


@pytest.mark.parametrize(("kills", "point"), [(1, "load"), pytest.param(0, "written", marks=pytest.mark.slow)])
def test_ranks_killed_before_the_commit_count(tmp_path: Path, kills: int, point: str) -> None:
    assert run_ranks(train, 2, args=(str(tmp_path), 2, None, "")) == [0, 0]
    for number in (1, 2, 3):
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(train, 2, args=(str(tmp_path), 3, kills, point))
        assert f"{number} crash" in known(tmp_path)["step-00000002"]
    assert run_ranks(train, 2, args=(str(tmp_path), 3, None, "")) == [1, 1]
    assert known(tmp_path) == {}


def test_ranks_killed_after_the_commit_do_not_count(tmp_path: Path) -> None:
    assert run_ranks(train, 2, args=(str(tmp_path), 1, None, "")) == [0, 0]
    for began in range(1, 5):
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(train, 2, args=(str(tmp_path), 9, 0, "renamed"))
        assert steps_in(tmp_path)[-1] == f"step-0000000{began + 1}"
    assert run_ranks(train, 2, args=(str(tmp_path), 6, None, "")) == [5, 5]


PROGRAM = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from stagereg import Checkpointer, Preemption

dist.init_process_group("gloo")
with Checkpointer(sys.argv[1], preemption=Preemption(grace_period=timedelta(seconds=2))) as checkpointer:
    start = checkpointer.restore({"x": torch.zeros(50), "n": 0})
    print("began", start, flush=True) if dist.get_rank() == 0 else None
    checkpointer.should_save(start + 1)
    dist.all_reduce(torch.ones(1))
    if start == 200 and dist.get_rank() == 1:
        os.abort()
    if start == 200 and sys.argv[2] == "waits":
        dist.all_reduce(torch.ones(1))
    while start == 200:
        pass
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("other", ["busy", "waits"])
def test_a_launcher_that_ends_the_other_ranks_hides_no_crash(tmp_path: Path, other: str) -> None:
    """It sends SIGTERM to rank 0, which would otherwise be a preemption."""
    save(tmp_path / "run", 100, 200)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "stagereg", "run", "--standalone", "--nproc-per-node=2", "program.py"]
    began = []
    for _ in range(4):
        ended = subprocess.run(
            [*command, str(tmp_path / "run"), other], cwd=tmp_path, capture_output=True, text=True, timeout=90
        )
        began += [line for line in ended.stdout.splitlines() if line.startswith("began")]
    assert began == ["began 200"] * 3 + ["began 100"], ended.stderr


RESTORES = """
import os, signal, sys, torch
from stagereg import Checkpointer

checkpointer = Checkpointer(sys.argv[1], every=100)
state = {"x": torch.zeros(50), "n": 0}
start = checkpointer.restore(state)
print("began", start, flush=True)
"""
KILLED, CRASHED = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSEGV"))


@pytest.mark.parametrize(("end", "counts"), [(KILLED, 1), ("1 / 0", 0), ("sys.exit(1)", 0), ("raise MemoryError", 1)])
def test_a_process_without_with_counts_its_death_and_its_lack_of_memory(tmp_path: Path, end: str, counts: int) -> None:
    save(tmp_path, 100)
    ended = run_forked(f"{RESTORES}\ncheckpointer.should_save(start + 1)\n{end}", tmp_path, timeout_s=60)
    assert "began 100" in ended.stdout
    assert known(tmp_path) == ({"step-00000100": "1 crash after it was restored"} if counts else {})


def test_a_refused_restore_is_no_crash_if_the_run_is_killed_afterwards(tmp_path: Path) -> None:
    save(tmp_path, 100)
    refused = RESTORES.replace("checkpointer.restore(state)", "None").replace(
        "print(",
        "\n    ".join(("try:", 'checkpointer.restore({"y": 1})')) + "\nexcept stagereg.CheckpointError:\n    print(",
    )
    ended = run_forked(f"import stagereg\n{refused}\ncheckpointer.lock()\n{KILLED}", tmp_path, timeout_s=60)
    assert ended.stdout == "began None\n", ended.stderr
    assert known(tmp_path) == {}


def test_a_run_that_finds_no_checkpoint_any_more_has_nothing_counted_before_it_saves(tmp_path: Path) -> None:
    save(tmp_path, 100)
    crash(tmp_path), crash(tmp_path)
    [checkpoint] = tmp_path.glob("step-*")
    away = checkpoint.rename(tmp_path / "away")
    (tmp_path / "latest").unlink()
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        assert checkpointer.restore(state_of()) is None
        checkpointer.lock()
    away.rename(checkpoint)
    assert known(tmp_path) == {}


def test_a_command_that_has_saved_here_is_counted_from_its_restore_on(tmp_path: Path) -> None:
    program = f"{RESTORES}\nif start == 100 and os.path.exists(sys.argv[1] + '/poison'): {CRASHED}\n"
    program += "for step in range((start or 0) + 1, (start or 0) + 101): checkpointer.maybe_save(step, state)\n"
    program += "checkpointer.close()"
    began = [run_forked(program, tmp_path, timeout_s=60).stdout]
    (tmp_path / "poison").touch()
    for _ in range(3):
        ended = run_forked(program, tmp_path, timeout_s=60)
        began.append(ended.stdout)
        assert ended.returncode == -signal.SIGSEGV
    assert 'After one more crash before a later checkpoint, resume="auto" skips this checkpoint' in ended.stderr
    assert "max_crashes=None" in ended.stderr
    assert began == ["began None\n", *["began 100\n"] * 3]
    assert known(tmp_path) == {"step-00000100": "quarantined after 3 crashes"}


@pytest.mark.parametrize("death", [KILLED, CRASHED, "1 / 0", "os._exit(1)", "pass"])
def test_a_program_that_never_saves_leaves_nothing_and_costs_no_checkpoint(tmp_path: Path, death: str) -> None:
    save(tmp_path, 100, 200)
    before = sorted(os.listdir(tmp_path))
    for _ in range(3):
        ended = run_forked(f"{RESTORES}\nassert os.listdir(sys.argv[1]) == {os.listdir(tmp_path)}\n{death}", tmp_path)
        assert ended.stdout == "began 200\n", ended.stderr
        assert "not closed" not in ended.stderr
        assert [each for each in sorted(os.listdir(tmp_path)) if not each.startswith(".reading.")] == before
    assert crash(tmp_path, lambda _: sys.exit(0)) == 200


def test_an_evaluation_runs_next_to_training_whichever_starts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100)
    reads = f"{RESTORES}\nwith checkpointer: pass"
    with Checkpointer(str(tmp_path), every=1, keep=9) as checkpointer:
        state = state_of()
        start = checkpointer.restore(state) or 0
        noted = (tmp_path / NOTE).read_bytes()
        for step in (start + 1, start + 2):
            ended = run_forked(reads, tmp_path, timeout_s=60)
            assert (ended.stdout, ended.stderr) == (f"began {step - 1}\n", "")
            assert step > start + 1 or (tmp_path / NOTE).read_bytes() == noted, "the note is of training"
            checkpointer.maybe_save(step, state)
            checkpointer.wait()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--evaluate"])
    with Checkpointer(str(tmp_path)) as evaluating:
        assert evaluating.restore(state_of()) == 102
        trains = f"{RESTORES}\ncheckpointer.save(start + 1, state)\ncheckpointer.close()"
        assert run_forked(trains, tmp_path, timeout_s=60).stdout == "began 102\n"
    assert steps_in(tmp_path)[-1] == "step-00000103"


def test_a_second_run_that_trains_is_refused_at_its_first_step(tmp_path: Path) -> None:
    save(tmp_path, 100)
    for asks in ("maybe_save(start + 1, state)", "save(start + 1, state)", "lock()"):
        with Checkpointer(str(tmp_path)) as checkpointer:
            assert checkpointer.restore(state_of()) == 100
            ended = run_forked(f"{RESTORES}\ncheckpointer.{asks}", tmp_path, timeout_s=60)
        assert ended.stdout == "began 100\n"
        assert f"{tmp_path} is in use: another run writes checkpoints there, process {os.getpid()}" in ended.stderr
        assert ended.returncode == 1
    assert steps_in(tmp_path) == ["step-00000100"]


@pytest.mark.parametrize("variable", ["STAGEREG_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_the_same_exception_is_counted_where_nobody_has_started_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    def first(_: object) -> None:
        raise ZeroDivisionError

    def second(_: object) -> None:
        raise ZeroDivisionError

    save(tmp_path, 100, 200)
    monkeypatch.setenv(variable, "1")
    assert [crash(tmp_path, first), crash(tmp_path, second)] == [200, 200]
    assert known(tmp_path) == {}, "each of them for the first time"
    assert [crash(tmp_path, first), crash(tmp_path, second)] == [200, 200]
    monkeypatch.setenv(variable, "0")
    assert crash(tmp_path, first) == 200
    assert known(tmp_path) == {"step-00000200": "2 crashes after it was restored"}
    monkeypatch.setenv(variable, "1")
    caplog.clear()
    assert [crash(tmp_path, first), crash(tmp_path, first)] == [200, 100]
    [told] = [each.getMessage() for each in caplog.records if "The next start" in each.getMessage()]
    assert told.endswith(
        'The next start with resume="auto" skips step-00000200, which is quarantined after 3 crashes. If the '
        "crashes have another cause, resume from it with restore=Restore(max_crashes=None)."
    )


def test_a_command_is_its_program_and_its_arguments_without_what_launchers_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(*argv: str, started: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [*argv])
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", started, *argv[1:]])
        return command_key()

    for name in ("train.py", "other.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    train = key("train.py", "lr=0.1")
    added = ["hydra.run.dir=outputs/1", "++checkpoint.resume=auto", "checkpoint/restore=fast", "hydra.job.num=0"]
    assert key(str(tmp_path / "train.py"), "lr=0.1", *added) == train
    others = [("train.py",), ("train.py", "lr=0.1", "evaluate=true"), ("other.py", "lr=0.1")]
    assert len({train, *(key(*each) for each in others)}) == 4
    assert [key(*each)[:8] == train[:8] for each in others] == [True, True, False]
    assert key("-c", "runs", started="train()") == key("-c", "runs", started="train()")
    assert key("-c", "runs", started="train()") != key("-c", "runs", started="evaluate()")


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
        (KeyError("out of memory"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error: Exception, counts: bool) -> None:
    assert is_out_of_memory(error) == counts


def fails(rank: int, world: int, root: str, how: str) -> None:
    """Rank 1 fails in the first step, and rank 0 for it."""
    with Checkpointer(root) as checkpointer:
        step = (checkpointer.restore(state_of()) or 0) + 1
        checkpointer.maybe_save(step, state_of())
        dist.barrier()  # rank 0 has noted the restore
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else 1 / 0
        if how == "waits":
            time.sleep(60)  # until it is killed for it
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "counts"), [("raises", 0), ("waits", 0), ("killed", 1)])
def test_the_rank_that_fails_first_decides(tmp_path: Path, how: str, counts: int) -> None:
    save(tmp_path, 100)
    with pytest.raises(RankFailure):
        run_ranks(fails, 2, args=(str(tmp_path), how))
    assert known(tmp_path) == ({"step-00000100": "1 crash after it was restored"} if counts else {})


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_is_freed_when_modules_are_empty_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.close()
    for module in (lock, quarantine):
        monkeypatch.setattr(module, "sys", None)  # as at the very end of a process
    del checkpointer
    gc.collect()
