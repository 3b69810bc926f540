"""``keep_ranks=true``: after a failure the processes of the other ranks stay, and the end is as if nothing had been."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.launch.leftovers as leftovers
import stagereg.shutdown as shutdown
from stagereg.errors import LaunchError
from stagereg.launch.leftovers import Baseline
from stagereg.launch.returning import keeps_ranks

from ..support.programs import SAVING, Program, await_gone

SCRIPT = """
import json, os, signal, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg

torch.manual_seed(5)
calls = 0


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    global calls, model
    calls += 1
    rank, attempt = dist.get_rank(), int(os.environ["STAGEREG_ATTEMPT"])
    found = torch.rand(1).item(), str(torch.get_default_dtype()), os.environ.get("MINE"), list(cfg.at)
    torch.set_default_dtype(torch.float64)
    os.environ["MINE"], ends_at = "set", cfg.at[attempt] if attempt < len(cfg.at) else None
    cfg.at = []
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout()))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.module, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        begun = checkpointer.restore(state)
        with open(f"{cfg.answers}/{rank}.json", "a") as file:
            about = {"begun": begun, "pid": os.getpid(), "calls": calls, "found": found}
            file.write(json.dumps(about | {"resume": cfg.checkpoint.resume}) + "\\n")
        try:
            for step in range((begun or 0) + 1, cfg.steps + 1):
                if cfg.what != "raise":
                    torch.manual_seed(step)  # what a lost rank alone had is not saved
                if step == ends_at and rank not in cfg.who:
                    if cfg.what == "hang":
                        time.sleep(1000)
                    if cfg.what == "thread":
                        threading.Thread(target=time.sleep, args=[1000], name="mine", daemon=True).start()
                optimizer.zero_grad()
                if step == ends_at and rank in cfg.who:
                    if cfg.what == "raise":
                        raise ValueError("no cheese")
                    if cfg.what == "freeze":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.full((4, 8), float(step * (rank + 1)))).square().mean().backward()
                optimizer.step()
                checkpointer.maybe_save(step, state)
        finally:
            if cfg.what != "global":
                del model
    if rank == 0:
        torch.save([state["model"].state_dict(), optimizer.state_dict()], f"{cfg.answers}/end")


if __name__ == "__main__":
    train()
"""
CONFIG = f"""{SAVING}
nproc: 2
restarts: 2
keep_ranks: true
steps: 12
at: [8]
who: [1]
checkpoint: {{every: 3}}
"""
BOUND_S = 30

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, CONFIG, SCRIPT)


def end_of(program: Program, *arguments: str) -> tuple[bytes, str]:
    """Return the state that a run ends with, and what it prints."""
    ended = program.run(*arguments)
    assert ended.returncode == 0, ended.stderr
    return (program.answers / "end").read_bytes(), ended.stderr


def expect_kept(program: Program, ranks: list[int], began: list[Any], nproc: int = 2) -> None:
    """Make sure that these ranks have stayed, that others are new, and where each attempt began."""
    for rank in range(nproc):
        answers = program.answers_of(rank)
        assert [each["begun"] for each in answers] == began
        assert [each["calls"] for each in answers] == ([1, 2] if rank in ranks else [1, 1])
        assert (answers[0]["pid"] == answers[1]["pid"]) == (rank in ranks)
        assert answers[0]["found"] == answers[1]["found"], "random numbers, settings, variables and config, as at first"


# -- runs


@pytest.mark.parametrize(
    ("nproc", "what", "at", "who", "began"),
    [
        pytest.param(2, "kill", 8, [1], [None, 7], marks=pytest.mark.slow),
        pytest.param(2, "kill", 8, [0], [None, 7], marks=pytest.mark.slow),
        pytest.param(3, "kill", 8, [0], [None, 7], marks=pytest.mark.slow),
        pytest.param(3, "kill", 8, [1, 2], [None, 7], marks=pytest.mark.slow),
        pytest.param(3, "freeze", 8, [2], [None, 7], marks=pytest.mark.slow),
        pytest.param(2, "raise", 8, [1], [None, 6], marks=pytest.mark.slow),
        pytest.param(3, "raise", 2, [0], [None, None], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_nothing_is_wrong_with_stay_and_the_end_is_the_same(
    program: Program, nproc: int, what: str, at: int, who: list[int], began: list[Any]
) -> None:
    given = f"nproc={nproc}", f"what={what}", f"who={who}", "notice_s=3"
    expected, _ = end_of(program, *given, "at=[]", "hydra.run.dir=first")
    for each in program.answers.glob("*.json"):
        each.unlink()
    end, printed = end_of(program, *given, f"at=[{at}]", "hydra.run.dir=second")
    stay = [rank for rank in range(nproc) if rank not in who]
    expect_kept(program, stay, began, nproc)
    assert "could not be kept" not in printed
    assert end == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("global", "rank 0 could not be kept: train.model (DistributedDataParallel) holds a process group of the run"),
        ("thread", "rank 0 could not be kept: its thread mine still runs"),
        ("hang", "rank 0 could not be kept: its function had not returned 5 s after the failure"),
    ],
)
def test_a_program_that_cannot_be_called_again_is_told_why_and_starts_anew(
    program: Program, what: str, why: str
) -> None:
    _, printed = end_of(program, f"what={what}")
    assert why in printed
    expect_kept(program, [], [None, 7])


@pytest.mark.slow
def test_a_rank_that_stays_does_not_begin_where_the_run_was_told_to_begin(program: Program) -> None:
    end_of(program, "at=[]", "steps=3", "hydra.run.dir=first")
    [newest] = program.folder.glob("first/checkpoints/step-*3")
    for each in program.answers.glob("*.json"):
        each.unlink()
    end_of(program, f"checkpoint.resume={newest}", "hydra.run.dir=second")
    expect_kept(program, [0], [3, 7])
    assert [each["resume"] for each in program.answers_of(0)] == [str(newest), "auto"]
    assert [each["resume"] for each in program.answers_of(1)] == [str(newest), "auto"]


@pytest.mark.slow
def test_ranks_stay_as_often_as_there_is_progress_and_end_with_the_run(program: Program) -> None:
    ended = program.run("at=[3,8,8,8]", "restarts=2")
    assert ended.returncode == 1
    assert ended.stderr.count("rank 0 stays") == 2
    assert "rank 0 could not be kept: the run had got no further since ranks were kept" in ended.stderr
    assert "that was done 2 times without a new checkpoint" in ended.stderr
    assert [each["calls"] for each in program.answers_of(0)] == [1, 2, 3, 1]
    assert await_gone(*(each["pid"] for each in program.answers_of(0)))


@pytest.mark.parametrize("value", [1, "often", None])
def test_what_says_neither_yes_nor_no_is_refused(value: Any) -> None:
    from omegaconf import OmegaConf

    with pytest.raises(LaunchError, match=f"keep_ranks={value} says neither true nor false"):
        keeps_ranks(OmegaConf.create({"keep_ranks": value, "restarts": 1}))


# -- what is left


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Baseline]:
    """Of this process, without what other tests have left in it."""
    monkeypatch.setattr(shutdown, "_shutdown", shutdown.Shutdown())
    before = [*leftovers._meshes()]
    found = leftovers._meshes
    monkeypatch.setattr(leftovers, "_meshes", lambda: (x for x in found() if not any(x is each for each in before)))
    (tmp_path / "c.yaml").write_text("lr: 1")
    source = SimpleNamespace(schema="file", path=str(tmp_path))
    yield Baseline(SimpleNamespace(runtime=SimpleNamespace(config_sources=[source], choices={})))
    gc.unfreeze()


class Thing:
    """Something that a group can be put on."""

    def __init__(self, held: Any) -> None:
        self.held = held


held: Any = None


@pytest.fixture
def group() -> Iterator[list[Any]]:
    """A group that is destroyed, and held in this list alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    yield groups
    groups.clear()


@pytest.mark.parametrize("hold", [Thing, lambda x: {"a": [x]}, lambda x: lambda: x], ids=["object", "dict", "closure"])
def test_what_holds_a_group_is_named_as_the_program_names_it(baseline: Baseline, group: list[Any], hold: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.held", hold(group[0]))
        left = weakref.ref(group.pop())
        named = f"{__name__}.held ({type(held).__name__}) holds a process group of the run before"
        assert baseline.find_left([left], []) == named
    assert baseline.find_left([left], []) == ""


def test_a_thread_that_holds_a_group_is_named_with_its_function(baseline: Baseline, group: list[Any]) -> None:
    over, began = threading.Event(), threading.Event()

    def prefetch(value: Any) -> None:
        began.set()
        over.wait(BOUND_S)

    thread = threading.Thread(target=prefetch, args=[group[0]])
    thread.start()
    assert began.wait(BOUND_S)
    left = baseline.find_left([weakref.ref(group.pop())], [])
    assert left == f"its thread {thread.name} still runs"
    assert "(prefetch)" in left
    over.set()
    thread.join()


class Work:
    """What a save is to the end of a process."""

    def finish(self) -> bool:
        return True


def test_what_has_not_ended_is_named(baseline: Baseline) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=[BOUND_S], name="mine")
    thread.start()
    assert baseline.find_left([], []) == "its thread mine still runs"
    assert baseline.find_left([], [thread]) == ""
    over.set()
    thread.join()
    work = Work()
    shutdown.wait_for(work)
    assert baseline.find_left([], []) == "work in the background, such as a save, has not ended"
    del work
    assert baseline.find_left([], []) == ""


def test_files_that_have_changed_are_named(baseline: Baseline, tmp_path: Path) -> None:
    os.utime(tmp_path / "c.yaml", (1, 1))
    assert baseline.find_left([], []) == f"{tmp_path}/c.yaml has changed"


def test_a_failure_that_nobody_has_raised_is_not_the_next_ones_and_holds_nothing(
    baseline: Baseline, group: list[Any]
) -> None:
    try:
        (lambda _: [].pop())(group[0])
    except IndexError as error:
        late = LaunchError("late")
        late.__cause__ = error
        shutdown.report_error(late)
        del late
    assert baseline.find_left([weakref.ref(group.pop())], []) == ""
    shutdown.finish()


def test_settings_are_those_of_before(baseline: Baseline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINE", "set")
    before = [get() for get, _ in leftovers._SETTINGS]
    drawn = torch.rand(2)
    random.seed(7)
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        baseline.set_back({"MORE": "told"})
        assert torch.is_grad_enabled()
    assert os.environ.get("MINE") is None
    assert os.environ.pop("MORE") == "told"
    assert [str(get()) for get, _ in leftovers._SETTINGS] == [*map(str, before)]
    assert torch.equal(torch.rand(2), drawn)
