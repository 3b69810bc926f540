"""A run below ``stagereg.main`` that receives a signal: it saves, exits with 75, and the next start resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import OmegaConf
from torch.distributed import HashStore

import stagereg.extensions.preemption.signals as preemption
import stagereg.launch.launch as launch
import stagereg.launch.local_ranks as local_ranks
from stagereg.base.command import publish_run, resume_overrides
from stagereg.errors import Preempted, Stopped
from stagereg.extensions.preemption.signals import PreemptionHandler
from stagereg.launch.exits import KEEPS_CODE, print_exit
from stagereg.launch.extension import Attempt, End, Start
from stagereg.launch.local_ranks import LocalRanks
from stagereg.launch.progress import Progress
from stagereg.launch.run_store import RunStore
from stagereg.launch.scheduler_task import SchedulerTask
from stagereg.sweep.result import JobResult

from ...support.programs import LIMIT_S, SAVING, STAGEREG_RUN, TORCHRUN, Program, comes_true

STEPS = 700
OF_TORCHRUN = " torchrun prints a traceback and exits with code 1; to exit with code 75, use `stagereg run` instead."

GRACE = "checkpoint.preemption.grace_period=5s"
CONFIG = f"""{SAVING}
nproc: 2
steps: {STEPS}
at: [30]
sweep: {{repeat: 0}}
checkpoint: {{every: 1000000}}
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path, CONFIG)


def latest(program: Program) -> int:
    (newest,) = program.folder.rglob("latest")
    return int(newest.resolve().name.removeprefix("step-"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arguments", [["nproc=1", "to=self"], pytest.param([], marks=pytest.mark.slow)], ids=len)
def test_a_signal_has_all_ranks_save_and_leave_with_75(program: Program, arguments: list[str]) -> None:
    ended = program.run(*arguments)
    assert ended.returncode == 75, ended.stderr
    lines = re.findall("^preempted.*", ended.stderr, re.MULTILINE)
    (line,) = lines
    goes_on = r"step (\d+) is saved\. To resume, run the same command with checkpoint\.dir=(\S+)\."
    step, directory = re.fullmatch(f"preempted by SIGTERM: {goes_on}", line).groups()
    assert int(step) == latest(program) >= 30
    assert Path(directory, "latest").exists()
    assert "Traceback" not in ended.stderr
    assert "stopped by" not in ended.stderr
    printed = ended.stdout + ended.stderr
    assert [printed.count(each) for each in ("received SIGTERM", "is saved", "newest valid")] == [1, 1, 0]
    job = JobResult.of_directory(Path(directory).parent)
    assert job.status == "unfinished"
    assert re.match(f"rank [01]: preempted by SIGTERM: step {step} is saved in /", str(job.error))
    assert not program.answer(0)["ended"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("start", "arguments"),
    [
        (None, []),
        (None, ["to=self", "at=[null,30]", "signal=SIGUSR1"]),
        (None, ["workers=1"]),
        (TORCHRUN, ["workers=1", "stager=pinned_cached"]),
        (STAGEREG_RUN, ["to=self", "at=[null,30]", "signal=SIGUSR1"]),
        ([*TORCHRUN, "--signals-to-handle=SIGTERM,SIGUSR1"], ["signal=SIGUSR1", "workers=1"]),
    ],
    ids=lambda given: "python" if given is None else " ".join(x for x in given if x != sys.executable) or "-",
)
def test_the_next_start_resumes_and_ends_as_an_uninterrupted_run(
    program: Program, start: list[str] | None, arguments: list[str]
) -> None:
    arguments = [*arguments, "checkpoint.dir=kept"]
    ended = program.run(*arguments, start=start)
    is_torchrun = start is not None and start[:3] == TORCHRUN[:3]  # which has codes of its own
    assert ended.returncode == (1 if is_torchrun else 75), ended.stderr
    assert (
        len(re.findall(r"^preempted by .* is saved in .*\. To resume, run the same", ended.stderr, re.MULTILINE)) == 1
    )
    assert ended.stderr.count(f"{OF_TORCHRUN}\n") == is_torchrun
    saved = latest(program)
    assert 30 <= saved < STEPS
    if is_torchrun:
        assert "exitcode  : 75" in ended.stderr or "SignalException" in ended.stderr
    ended = program.run(*arguments, start=start)
    assert ended.returncode == 0, ended.stderr
    ranks = 1 if "nproc=1" in arguments else 2
    total = sum(range(1, ranks + 1)) * STEPS * (STEPS + 1) / 2
    for rank in range(ranks):
        first, resumed, end = program.answers_of(rank)
        assert [about["start"] for about in (first, resumed, end)] == [0, saved, saved]
        assert (first["ended"], resumed["ended"], end["ended"], end["value"]) == (False, False, True, total)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_is_stopped_by_the_job_that_was_preempted(program: Program) -> None:
    ended = program.run("-m", f"steps={STEPS},{STEPS + 1}", "hydra.sweep.dir=sweep")
    assert ended.returncode == 75, ended.stderr
    line = f"^preempted by SIGTERM: step .* in {program.folder}/sweep/0/checkpoints. To resume, run the same command.$"
    assert len(re.findall(line, ended.stderr, re.MULTILINE)) == 1
    assert [path.name for path in (program.folder / "sweep").iterdir() if path.is_dir()] == ["0"]


LATE = "preempted: the state is saved, but the process did not exit within the grace period"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("arguments", "code", "last_line"),
    [
        (["what=freeze", "checkpoint.preemption.grace_period=1s"], 143, "stopped by SIGTERM"),
        (["what=linger", GRACE], 75, LATE),
        (["what=fail_at_signal"], 143, "stopped by SIGTERM"),
        (["checkpoint.preemption.grace_period=null"], 143, "stopped by SIGTERM"),
        (["checkpoint.preemption.grace_period=null", "signal=SIGUSR1"], 128 + signal.SIGUSR1, "stopped by SIGUSR1"),
    ],
)
def test_ranks_that_do_not_save_and_leave_are_ended(
    program: Program, arguments: list[str], code: int, last_line: str
) -> None:
    ended = program.run(*arguments)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1] == last_line
    assert ended.stderr.count("KeyError: 'no cheese'") == ("what=fail_at_signal" in arguments)
    assert "checkpoint.preemption.grace_period=null" not in arguments or ended.stderr == f"{last_line}\n"
    assert code != 75 or latest(program) >= 30


HERE = Preempted(7, "/out/run/c", signal.SIGTERM)
HYDRA = {
    "runtime": {"output_dir": "/out/run", "cwd": "/home"},
    "mode": RunMode.RUN,
    "run": {"dir": "out/${now:%H}"},
    "sweep": {"dir": "/out"},
}


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (Preempted(7, "/kept", signal.SIGTERM), {}, "step 7 is saved in /kept. To resume, run the same command."),
        (Preempted(7, "s3://a/b", signal.SIGUSR1), {}, "saved in s3://a/b. To resume, run the same command."),
        (HERE, {}, "with checkpoint.dir=/out/run/c."),
        (HERE, {"run": {"dir": "/out/run"}}, "in /out/run/c. To resume, run the same command."),
        (
            HERE,
            {"resume": "never"},
            ". To resume, run the same command with checkpoint.resume=auto checkpoint.dir=/out/run/c.",
        ),
        (
            HERE,
            {"run": {"dir": "/out/run"}, "resume": "/kept/step-00000004"},
            "in /out/run/c. To resume, run the same command with checkpoint.resume=auto.",
        ),
        (HERE, {"mode": RunMode.MULTIRUN}, "step 7 is saved in /out/run/c. To resume, run the same command."),
        (
            HERE,
            {"mode": RunMode.MULTIRUN, "sweep": {"dir": "a/${now:b}"}},
            "step 7 is saved. To resume, run the same command with hydra.sweep.dir=/home/a/b.",
        ),
        (Stopped(signal.SIGTERM, "the disk is full"), {}, "stopped by SIGTERM: the disk is full"),
    ],
)
def test_the_message_has_the_command_that_resumes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Preempted | Stopped,
    changes: dict[str, Any],
    message: str,
) -> None:
    setup_globals()
    hydra = OmegaConf.create({**HYDRA, **changes})
    monkeypatch.setenv("STAGEREG_RUN", "")
    publish_run(hydra.runtime.output_dir, resume_overrides(hydra, OmegaConf.create({"checkpoint": {**changes}})))
    print_exit(error)
    printed = capsys.readouterr().err
    assert printed.endswith(f"{message}\n")
    assert printed.count("\n") == 1


def test_below_torchrun_the_last_line_says_what_that_makes_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of torchrun, or of stagereg run, which is one")
    print_exit(HERE)
    assert capsys.readouterr().err.endswith(f"{OF_TORCHRUN}\n")
    monkeypatch.setenv(KEEPS_CODE, "1")
    print_exit(HERE)
    assert capsys.readouterr().err.endswith(" To resume, run the same command.\n")


def test_a_signal_is_forwarded_and_a_later_one_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    script = f"trap 'echo received >> {log}' TERM USR1; echo ready >> {log}; while true; do sleep 0.01; done"

    def await_lines(lines: list[str]) -> None:
        assert comes_true(lambda: log.exists() and log.read_text().split() == lines), log.read_text()

    with LocalRanks() as ranks:
        ranks.start(0, Start(["sh", "-c", script], str(tmp_path), {**os.environ}))
        await_lines(["ready"])
        for count, number in enumerate([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], 1):
            os.kill(os.getpid(), number)
            await_lines(["ready", *["received"] * count])
        assert (ranks.forwarded, ranks.stopped) == (signal.SIGTERM, None), "as one that forwards it too may send it"
        monkeypatch.setattr(local_ranks, "SAME_SIGNAL_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (ranks.wait(), ranks.stopped) == ({}, signal.SIGTERM)
        assert ranks.end(signal.SIGKILL) == {0: -signal.SIGKILL}
    assert log.read_text().split() == ["ready", *["received"] * 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_signal_before_the_ranks_end_the_run(number: signal.Signals) -> None:
    with LocalRanks() as ranks:
        os.kill(os.getpid(), number)
    assert (ranks.forwarded, ranks.stopped) == (None, number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_one_process_goes_on_at_a_signal_that_its_shell_ignores(program: Program) -> None:
    shell = ["sh", "-c", 'trap "" INT HUP QUIT; exec "$0" "$@"', sys.executable]  # as nohup and & of a script do
    ended = program.run("steps=40", "signal=SIGINT", "nproc=1", "to=self", start=shell)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert program.answer(0)["ended"]


def test_what_is_ignored_stays_ignored_and_sigterm_ends_the_ranks() -> None:
    ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        with LocalRanks() as ranks:
            for number in ignored:
                os.kill(os.getpid(), number)
            assert ranks.stopped is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert ranks.stopped == signal.SIGTERM
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in ignored)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_to_ranks_alone_ends_the_run_with_its_code() -> None:
    for code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1):
        attempt = Attempt(0, SchedulerTask(), Start([], "", {}), RunStore(HashStore(), 0, 2), None, Progress)
        with pytest.raises(SystemExit) as ended:
            launch._end(End(attempt, {1: code}, 0.0), "", None)
        assert ended.value.code == code


def test_only_the_main_thread_listens() -> None:
    received: list[bool] = []
    handler = PreemptionHandler(1.0, str)
    asking = threading.Thread(target=lambda: received.append(handler.listen()))
    asking.start()
    asking.join(LIMIT_S)
    assert received == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not preemption._listener.handlers


RESTORES = """import os, signal, stagereg
checkpointer = stagereg.Checkpointer("kept")
handler = signal.getsignal(signal.SIGTERM)
checkpointer.close()
signal.signal(signal.SIGTERM, handler)  # as a library does that has saved the handler that it found
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Exception:
    raise SystemExit(3)
"""


def test_a_handler_that_is_restored_after_the_end_of_the_checkpointer_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTORES], cwd=tmp_path, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
