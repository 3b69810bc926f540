"""``restarts=N``: a run that fails goes on by itself, as if nothing had been, unless the same would come again."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import stagereg.base.record as record
from stagereg.extensions.recovery.restarts import Restarts
from stagereg.launch.progress import Progress

from ...support.programs import SAVING, Program

SCRIPT = """
import json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    rank, attempt = dist.get_rank(), int(os.environ.get("STAGEREG_ATTEMPT", 0))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8, device=cfg.device))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.module, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        begun = checkpointer.restore(state)
        with open(f"{cfg.answers}/{rank}.json", "a") as file, open(f"/proc/{os.getppid()}/cmdline") as parent:
            warm, backend = "recovery.warm" in parent.read(), dist.get_backend_config()
            file.write(json.dumps({"begun": begun, "warm": warm, "backend": backend}) + "\\n")
        for step in range((begun or 0) + 1, cfg.steps + 1):
            optimizer.zero_grad()
            model(torch.full((4, 8), float(step * (rank + 1)), device=cfg.device)).square().mean().backward()
            optimizer.step()
            time.sleep(cfg.step_s)
            checkpointer.maybe_save(step, state)
            fails = attempt < cfg.times and step == cfg.at[min(attempt, len(cfg.at) - 1)]
            if fails:
                checkpointer.wait()
            if fails and (cfg.what == "kill all" or rank == dist.get_world_size() - 1):
                match cfg.what:
                    case "kill" | "kill all":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "raise":
                        raise ValueError("no cheese")
                    case "bad numbers":
                        raise RuntimeError("the loss is nan")
                    case "configure":
                        stagereg.registry.find("stager", "no such stager")
                    case "signal":
                        os.kill(int(os.environ.get("FORKED_BY") or os.environ["STAGEREG_LAUNCHER"]), signal.SIGTERM)
                        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save([model.module.state_dict(), optimizer.state_dict()], f"{cfg.answers}/end")


if __name__ == "__main__":
    train()
"""
CONFIG = f"""{SAVING}
nproc: 2
restarts: 2
steps: 12
step_s: 0.0
at: [8]
times: 1
device: cpu
checkpoint: {{every: 3}}
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, CONFIG, SCRIPT)


def end_of(program: Program, *arguments: str) -> bytes:
    """Return the state that a run ends with."""
    ended = program.run(*arguments)
    assert ended.returncode == 0, ended.stderr
    return (program.answers / "end").read_bytes()


def began(program: Program) -> list[int | None]:
    return [each["begun"] for each in program.answers_of(0)]


def refusal(program: Program, *arguments: str) -> subprocess.CompletedProcess[str]:
    ended = program.run(*arguments)
    assert ended.returncode == 1
    return ended


pytestmark = pytest.mark.timeout(300)


# -- runs


def test_a_run_that_has_failed_goes_on_and_ends_as_one_that_has_not(program: Program) -> None:
    expected = end_of(program)
    (program.answers / "0.json").unlink()
    assert end_of(program, "what=kill") == expected
    assert began(program) == [None, 8], "from what those saved who were left"
    assert len(program.run_folders()) == 2, "each start has a folder, and a restart has that of its run"


def test_a_run_reports_its_own_checkpoints_where_runs_share_a_folder(program: Program) -> None:
    theirs = {"t": 1.0, "run": "other.0"}
    ended = {"event": "end", "status": "failed", "error": "theirs"}
    steps = [{"event": name, "step": 900, "dir": "/theirs"} for name in ("begin", "step", "write")]
    add(program.folder, 0, *(each | theirs for each in ({"event": "start"}, *steps, ended)))
    ended = refusal(program, "hydra.run.dir=.", "nproc=1", "restarts=1", "what=kill all", "times=9", "at=[4]")
    assert "The newest checkpoint is step 3, in " in ended.stderr
    assert "1 restarts made no new checkpoint" in ended.stderr
    log = (program.folder / "train.log").read_text()
    assert log.count("stagereg: Restart") == log.count("stagereg: Restart 1 took ") == 1, (
        "the first start is no restart"
    )


@pytest.mark.slow
def test_an_error_that_comes_again_at_the_same_step_ends_the_run(program: Program) -> None:
    ended = refusal(program, "what=raise", "times=9")
    assert ended.stderr.count("ValueError: no cheese") == 2
    assert "restart 1; 1 more allowed without a new checkpoint" in ended.stderr
    assert "The run is not restarted: the same error occurred twice after step 8." in ended.stderr
    assert began(program) == [None, 6]


@pytest.mark.slow
def test_an_error_of_the_configuration_is_not_tried_again(program: Program) -> None:
    ended = refusal(program, "what=configure")
    assert "no such stager" in ended.stderr
    assert "again" not in ended.stderr
    assert began(program) == [None]


@pytest.mark.slow
def test_processes_that_die_start_as_often_as_there_is_progress(program: Program) -> None:
    ended = refusal(program, "what=kill all", "times=9", "at=[2,8,8,8]")  # steps 3 and 6 are saved after the first one
    assert began(program) == [None, None, 6, 6]
    assert "2 restarts made no new checkpoint, which is the limit" in ended.stderr
    assert ended.stderr.count("more allowed without a new checkpoint") == 3


@pytest.mark.slow
def test_a_run_that_has_come_further_does_not_begin_where_it_was_told_to(program: Program) -> None:
    end_of(program, "steps=6", "hydra.run.dir=first")
    [newest] = program.folder.glob("first/checkpoints/step-*3")
    end_of(program, "what=kill", "at=[8]", f"checkpoint.resume={newest}", "hydra.run.dir=second")
    assert began(program) == [None, 3, 8]


def test_a_signal_ends_a_run_that_fails_at_the_same_time(program: Program) -> None:
    ended = program.run("what=signal", "at=[4]")
    assert ended.returncode == 128 + signal.SIGTERM
    assert "more allowed without a new checkpoint" not in ended.stderr
    assert "stopped by SIGTERM" in ended.stderr


@pytest.mark.slow
def test_a_rank_that_starts_again_has_torch_already(program: Program) -> None:
    ended = program.run("what=kill", "steps=140", "at=[130]", "step_s=0.3", forks_ranks=False)
    assert ended.returncode == 0, ended.stderr
    assert [each["warm"] for each in program.answers_of(1)] == [False, True]
    assert "Rank 0 saved step 130, in " in ended.stderr
    assert "rank 1: killed by SIGKILL" in ended.stderr, "the signal is told too"


# -- the decision alone


DEAD = {1: "rank 1 failed (process 7 on here): its process has terminated."}


def at(step: int | None, saved: int | None = None) -> Progress:
    return Progress(step, None if saved is None else {"step": saved})


def test_a_new_checkpoint_makes_the_count_begin_anew() -> None:
    restarts = Restarts(2)
    for step in (1, 1, 5, 5, 9, 9):
        assert restarts.refusal(DEAD, True, at(step + 1, step)) is None
        assert restarts.progressed
    assert restarts.count == 6
    assert "2 restarts made no new checkpoint" in str(restarts.refusal(DEAD, True, at(10, 9)))


def test_a_checkpoint_that_the_run_resumed_from_is_no_progress() -> None:
    restarts, reached = Restarts(1), at(25)._replace(resumed={"step": 20, "dir": "/x"})
    assert restarts.refusal(DEAD, True, reached) is None
    assert not restarts.progressed
    assert restarts.refusal(DEAD, True, reached)


def test_an_older_checkpoint_that_is_saved_again_is_no_progress() -> None:
    restarts = Restarts(2)
    refusals = [restarts.refusal(DEAD, True, at(15, saved)) for saved in (14, 14, 12)]
    assert refusals[:2] == [None, None]
    assert "2 restarts made no new checkpoint" in str(refusals[2])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "bad numbers"])
def test_a_run_that_fails_after_each_checkpoint_goes_back_and_then_ends(program: Program, what: str) -> None:
    ended = refusal(program, "nproc=1", f"what={what}", "times=99", "at=[8]", "restarts=99")
    noted = what != "kill"  # the first exception of its kind
    assert began(program) == [None, *[6] * (3 + noted), *[3] * 3]
    assert "none of them is valid" in ended.stderr


def test_the_last_crash_before_the_quarantine_is_told_with_the_option_that_prevents_it(program: Program) -> None:
    end_of(program, "nproc=1", "steps=6", "hydra.run.dir=run")
    crashes = ["nproc=1", "hydra.run.dir=run", "checkpoint.restore.max_crashes=2"]
    ended = refusal(program, *crashes, "what=kill", "times=9", "at=[7]", "restarts=1")
    assert "step-00000006 in " in ended.stdout
    assert "1 crash after it was restored. After one more crash before a later checkpoint" in ended.stdout
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("The newest checkpoint is step 6, in ")
    assert "The next start with checkpoint.resume=auto skips step-00000006, which is quarantined after 2 cra" in last
    assert "resume from it with checkpoint.restore.max_crashes=null." in last
    assert "To resume" not in ended.stderr
    end_of(program, *crashes)
    assert began(program) == [None, 6, 6, 3]


def test_another_error_or_step_is_another_failure() -> None:
    restarts = Restarts(9)
    errors = {0: "Traceback\n  line 3\nKeyError: 'cheese'"}
    assert restarts.refusal(errors, False, at(3)) is None
    assert restarts.refusal(errors, False, at(4)) is None
    assert restarts.refusal({0: "KeyError: 'wine'"}, False, at(4)) is None
    assert restarts.refusal({1: "File\nKeyError: 'wine'", 0: "x"}, False, at(4)), "on another rank, seen by another"


@pytest.mark.parametrize("text", ["FloatingPointError: loss", "RuntimeError: loss is NaN at 7", "E: a non-finite norm"])
def test_bad_numbers_may_be_in_the_checkpoint_and_another_is_tried(text: str) -> None:
    restarts = Restarts(2)
    assert [restarts.refusal({0: text}, False, at(3, 2)) for _ in range(2)] == [None, None]
    assert "2 restarts made no new checkpoint" in str(restarts.refusal({0: text}, False, at(3, 2)))
    named = {0: "KeyError: 'nanny'"}
    assert [restarts.refusal(named, False, at(3, 3)) is None for _ in range(2)] == [True, False]


def add(folder: Path, rank: int, *events: dict[str, Any], cut: bytes = b"") -> None:
    with (folder / record.file_name(rank)).open("ab") as file:
        file.write(b"".join([*map(record._line, events), cut]))


def test_progress_is_what_is_recorded_last(tmp_path: Path) -> None:
    assert Progress.of(str(tmp_path), "a.0") == at(None)
    of = {"run": "a.0"}
    events = [
        {"event": "step", "step": 4, "t": 1.0, **of},
        {"event": "write", "step": 3, "dir": "x", "t": 1.5, **of},
        {"event": "step", "step": 5, "t": 2.0, **of},
    ]
    add(tmp_path, 0, *events, cut=b'{"event":"stage","why":"step"}\n{"event":"tier","step":4\n]')
    progress = Progress.of(str(tmp_path), "a.0")
    assert (progress.step, progress.newest, progress.near) == (5, 3, None)
    saved = {"event": "write", "step": 5, "dir": "x", "t": 3.0, **of}
    add(tmp_path, 1, saved)
    assert Progress.of(str(tmp_path), "a.0").stored == saved, "another rank has saved last, since rank 0 has failed"


def test_progress_is_of_one_run_and_its_steps_are_of_one_attempt(tmp_path: Path) -> None:
    saved = {"event": "write", "step": 3, "dir": "/mine", "t": 2.0, "run": "a.1"}
    step = {"event": "step", "step": 4, "t": 3.0, "run": "a.1"}
    others = [{**saved, "step": 900, "dir": "/theirs", "t": 9.0}, {**step, "step": 950, "t": 9.0}]
    add(tmp_path, 0, step, saved, *({**each, "run": run} for each in others for run in ("b.0", "a2.1", "", None)))
    assert Progress.of(str(tmp_path), "a.1") == (4, saved, None, None)
    assert Progress.of(str(tmp_path), "a.10") == (None, saved, None, None), "it has taken no step yet"
    assert Progress.of(str(tmp_path), "c.0") == at(None)


@pytest.mark.parametrize(
    ("source", "directory", "resumed"),
    [
        ("/mine/step-20", "/mine", {"step": 20, "dir": "/mine"}),
        ("/theirs/step-20", "/mine", None),
        ("", "/mine", None),
        ("", "", None),
    ],
)
def test_a_run_without_a_save_has_the_checkpoint_that_it_resumed_from(
    tmp_path: Path, source: str, directory: str, resumed: dict[str, Any] | None
) -> None:
    begin = {"event": "begin", "t": 1.0, "source": source, "restored": 20, "dir": directory}
    add(tmp_path, 0, {**begin, "source": "/mine/step-900", "run": "b.0"}, {**begin, "run": "a.0"})
    assert Progress.of(str(tmp_path), "a.0") == (None, None, None, resumed)
