"""A checkpoint that runs crash after is passed over, on any number of ranks, and in good order nothing is counted."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.checkpoint.load.crashes as crashes
import stagereg.checkpoint.store.failpoints as failpoints
import stagereg.checkpoint.store.lock as lock
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.load.crashes import crashes_in, is_in_order
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, Preempted, Stopped
from stagereg.option_text import in_config
from stagereg.testing.ranks import RankFailure, run_ranks

from ...support.forks import run_forked
from ...support.pages import Page

NOTE = ".restored.json"


def state_of(step: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((50,), float(step)), "n": step}


def save(root: Path | str, *steps: int, keep: int = 9) -> None:
    with Checkpointer(str(root), keep=keep, resume="never") as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step))


def crash(root: Path | str, act: Callable[[Checkpointer], object] = lambda _: 1 // 0, **options: Any) -> int | None:
    """A run that restores, acts and raises; return the step that it went on from."""
    began = []

    def run() -> None:
        with Checkpointer(str(root), **options) as checkpointer:
            began.append(checkpointer.restore(state_of()))
            act(checkpointer)

    with pytest.raises((ZeroDivisionError, KeyboardInterrupt, SystemExit)):
        run()
    return began[0]


def known(root: Path | str) -> dict[str, str]:
    return {path.rpartition("/")[2]: str(each) for path, each in crashes_in(open_store(str(root))).items()}


def steps_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


@pytest.fixture(params=["path", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "path" else f"memory://bucket{tmp_path}/run"


def test_after_three_crashes_the_one_before_is_restored(root: str) -> None:
    save(root, 100, 200)
    assert [crash(root) for _ in range(3)] == [200, 200, 200]
    assert [each for name, each in known(root).items() if "200" in name] == ["given up after 3 crashes"]
    assert [crash(root) for _ in range(3)] == [100, 100, 100]
    with pytest.raises(CheckpointError) as refused, Checkpointer(root) as checkpointer:
        checkpointer.restore(state_of())
    for part in ("step-00000200", "step-00000100", "beyond step 200", "give_up_after=None", 'resume="never"'):
        assert part in str(refused.value)
    assert crash(root, restore=Restore(give_up_after=None)) == 200
    assert crash(root, restore=Restore(give_up_after=4)) == 200


def test_the_page_shows_what_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 200, 300)
    for _ in range(3):
        crash(tmp_path)
    caplog.clear()
    with in_config({"checkpoint": "checkpoint"}):  # as the page
        assert crash(tmp_path) == 200
    [shown] = [each for each in Page("checkpoints.md").of("text") if "is given up and passed over" in each]
    logged = "\n".join(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
    assert logged.replace(str(tmp_path), "runs/gpt") == shown.strip()


def test_the_next_commit_makes_a_checkpoint_good_again(root: str) -> None:
    save(root, 100, 200)

    def commit(checkpointer: Checkpointer) -> None:
        checkpointer.save(300, state_of(300))
        checkpointer.wait()
        assert known(root) == {}
        assert 1 // 0

    assert [crash(root), crash(root), crash(root, commit)] == [200, 200, 200]
    assert known(root) == {}
    assert open_store(root).note(NOTE) == b""


def test_crashes_after_another_one_take_no_count_back(root: str) -> None:
    save(root, 100, 200)
    crash(root), crash(root)
    older = open_store(root).checkpoints()[0][1].path
    assert crash(root, resume=older) == 100
    assert [crash(root) for _ in range(2)] == [200, 100]


@pytest.mark.parametrize("how", ["end", "close", "garbage", "Ctrl-C", "exit 0", "preempted", "stopped", "refused"])
def test_an_end_in_good_order_is_no_crash(tmp_path: Path, how: str) -> None:
    save(tmp_path, 100)
    crash(tmp_path)
    ends: dict[str, BaseException] = {
        "Ctrl-C": KeyboardInterrupt(),
        "exit 0": SystemExit(0),
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
        said = [each.getMessage() for each in caplog.records if "asked for" in each.getMessage()]
        path = tmp_path / "step-00000200"
        end = f"is restored since it was asked for, although it is given up after {3 + number} crashes."
        assert said == [f"{path} {end}"]
    with Checkpointer(str(tmp_path / "other")) as checkpointer:  # of another directory nothing is counted
        assert checkpointer.restore(state_of(), source=tmp_path) == 100
    assert known(tmp_path)["step-00000200"] == "given up after 6 crashes"


def test_retention_neither_counts_nor_deletes_a_given_up_one(tmp_path: Path) -> None:
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
    assert known(tmp_path) == {"step-00000200": "given up after 3 crashes"}
    with Checkpointer(str(tmp_path), keep=2) as checkpointer:
        checkpointer.restore(state_of())
        checkpointer.save(200, state_of(200))
    assert [name.partition(".")[0] for name in steps_in(tmp_path)] == ["step-00000120", "step-00000200"]
    assert known(tmp_path) == {}, "it is another checkpoint of that step"


def test_a_step_that_a_run_saves_again_long_after_it_was_given_up_is_another_checkpoint(root: str) -> None:
    def commit(*steps: int) -> Callable[[Checkpointer], None]:
        def act(checkpointer: Checkpointer) -> None:
            for step in steps:
                checkpointer.save(step, state_of(step))
                checkpointer.wait()
            assert 1 // 0

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
    assert "crashes are not counted in" in caplog.text


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
from stagereg import Checkpointer, Leave

dist.init_process_group("gloo")
with Checkpointer(sys.argv[1], leave=Leave(grace=timedelta(seconds=2))) as checkpointer:
    start = checkpointer.restore({"x": torch.zeros(50), "n": 0})
    print("began", start, flush=True) if dist.get_rank() == 0 else None
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


def test_a_process_without_with_counts_its_errors_alone(tmp_path: Path) -> None:
    save(tmp_path, 100)
    program = (
        "import sys, torch; from stagereg import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1])\n"
        "assert checkpointer.restore({'x': torch.zeros(50), 'n': 0}) == 100\n"
    )
    counted = []
    for more in ("sys.exit()", "1 / 0", "import os; os._exit(0)"):
        run_forked(program + more, tmp_path, timeout_s=60)
        counted.append(json.loads((tmp_path / NOTE).read_text())["restored"] != "" if known(tmp_path) else False)
    assert counted == [False, True, True]
    assert known(tmp_path) == {"step-00000100": "2 crashes after it was restored"}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_is_freed_when_modules_are_empty_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.close()
    for module in (lock, crashes):
        monkeypatch.setattr(module, "sys", None)  # as at the very end of a process
    del checkpointer
    gc.collect()
