"""``stagereg follow``: a command runs once on each new checkpoint, also where the follower is stopped or killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import stagereg.commands.following as following_module
from stagereg.checkpoint.store.open_store import open_store

from ..support.programs import comes_true
from .checkpoint_directories import path_of, save
from .conftest import Command

LIMIT_S = 60.0
LOG = """
import os, sys, time
with open(sys.argv[1], "a") as log:
    print(os.environ["STAGEREG_STEP"], file=log, flush=True)
"""


class Job:
    """A command that logs the steps that it was run on, and then does as ``more`` says."""

    def __init__(self, folder: Path, more: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.script, self.log = folder / "job.py", folder / "log"
        self.does(more)

    def does(self, more: str) -> None:
        self.script.write_text(LOG + more)

    @property
    def command(self) -> list[str]:
        return ["--", sys.executable, "-S", str(self.script), str(self.log), "{}", "--newest"]

    @property
    def steps(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture(params=["path", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "path" else f"memory://bucket{tmp_path}/run"


def until(condition: Callable[[], Any]) -> None:
    assert comes_true(condition, LIMIT_S), "it did not come about"


@contextmanager
def following(root: Path, job: Job, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A follower in a process of its own, which is gone in the end."""
    command = [sys.executable, "-m", "stagereg", "follow", str(root), "--poll", "50ms", *options, *job.command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_follower_may_be_there_before_its_run(tmp_path: Path, job: Job, command: Command) -> None:
    root = tmp_path / "run"
    with following(root, job, "--idle", "10ms") as follower:
        assert follower.stderr is not None
        assert follower.stderr.readline() == f"stagereg: waiting until {root} exists\n"
        for make in (root.mkdir, lambda: save(root, 100)):
            with pytest.raises(subprocess.TimeoutExpired):
                follower.wait(0.5)
            make()
        assert follower.wait(LIMIT_S) == 0
    assert job.steps == [100]
    waits = ("--poll", "10ms", "--idle", "1h", "--wait", "20ms")
    for folder in (tmp_path / "never", tmp_path):
        seen = command("follow", folder, *waits, *job.command, code=1)
        assert f"no checkpoint in {folder} after 0.02 s (--wait)" in seen.err
    assert job.steps == [100]


def test_each_checkpoint_is_taken_once_in_order(root: str, job: Job, command: Command) -> None:
    job.does("assert sys.argv[2] == os.environ['STAGEREG_CHECKPOINT'] and 'step-' in sys.argv[2]")
    save(root, 100, 200, 300)
    for _ in range(2):
        command("follow", root, "--idle", "0", *job.command)
        assert job.steps == [100, 200, 300]
    save(root, 250)  # by a run that has gone back: newest means committed last
    save(root, 300, salt="again")
    command("follow", root, "--idle", "0", *job.command)
    assert job.steps == [100, 200, 300, 250, 300]
    command("follow", root, "--idle", "0", "--name", "another", *job.command)
    assert job.steps[5:] == [100, 200, 250, 300] or job.steps[5:] == [100, 200, 300, 250, 300]


def test_one_that_gets_its_plain_name_is_not_taken_again(tmp_path: Path, job: Job, command: Command) -> None:
    root = tmp_path / "run"
    save(root, 100)
    with open_store(root).readers.read_lease(str(path_of(root, 100))):
        [again] = save(root, 100, salt="again")
        assert again != str(path_of(root, 100))
        command("follow", root, "--idle", "0", *job.command)
    save(root, 200)
    assert not os.path.exists(again)
    command("follow", root, "--idle", "0", *job.command)
    assert job.steps == [100, 100, 200]


def test_the_newest_alone_passes_over_the_others_for_good(tmp_path: Path, job: Job, command: Command) -> None:
    save(tmp_path / "run", 100, 200, 300)
    seen = command("follow", tmp_path / "run", "--newest", "--idle", "0", *job.command)
    assert "skipped, because step-00000300 is newer: step-00000100, step-00000200" in seen.err
    save(tmp_path / "run", 400)
    command("follow", tmp_path / "run", "--idle", "0", *job.command)
    assert job.steps == [300, 400]


def test_damaged_ones_are_passed_over_and_reported(tmp_path: Path, job: Job, command: Command) -> None:
    root = tmp_path / "run"
    save(root, 100, 200, 300)
    content = (path_of(root, 200) / "a").read_bytes()
    (path_of(root, 200) / "a").write_bytes(content[:-1] + b"?")  # of the same size
    (path_of(root, 100) / "manifest.json").unlink()
    seen = command("follow", root, "--idle", "0", *job.command, code=1)
    assert job.steps == [300]
    assert f"{path_of(root, 200)} is corrupt and was skipped: a: CRC-32 mismatch" in seen.err
    assert f"{path_of(root, 100)} is corrupt and was skipped: manifest.json: missing" in seen.err
    assert "skipped corrupt checkpoints: step-00000100, step-00000200" in seen.err
    (path_of(root, 200) / "a").write_bytes(content)  # put back
    command("follow", root, "--idle", "0", *job.command, code=1)
    assert job.steps == [300, 200]


def test_a_command_that_fails_is_tried_again(
    tmp_path: Path, job: Job, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "_PAUSE_S", 0.001)
    save(tmp_path / "run", 100, 200)
    job.does("sys.exit(3 * (open(sys.argv[1]).read().split().count('100') < 3))")
    seen = command("follow", tmp_path / "run", "--idle", "0", *job.command)
    assert job.steps == [100, 100, 100, 200]
    assert "step-00000100: the command exited with code 3; 2 more attempts" in seen.err


def test_one_that_fails_for_good_is_in_the_exit_code(tmp_path: Path, job: Job, command: Command) -> None:
    save(tmp_path / "run", 100, 200)
    job.does("sys.exit(os.environ['STAGEREG_STEP'] == '100')")
    options = ("follow", tmp_path / "run", "--idle", "0", "--retries", "0")
    for _ in range(2):
        seen = command(*options, *job.command, code=1)
        assert "the command failed for step-00000100. Pass --failed to run it again" in seen.err
        assert job.steps == [100, 200]
    job.does("")
    command(*options, "--failed", *job.command)
    assert job.steps == [100, 200, 100]
    command(*options, *job.command)


def test_it_ends_by_the_step_that_was_asked_for(tmp_path: Path, job: Job) -> None:
    root = tmp_path / "run"
    with following(root, job, "--until-step", "250") as follower:
        save(root, 100)
        until(lambda: job.steps == [100])
        save(root, 300)
        assert follower.wait(LIMIT_S) == 0
    assert job.steps == [100, 300]
    with following(root, job, "--until-step", "250") as follower:
        assert follower.wait(LIMIT_S) == 0


SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in ((signal.SIGINT, 130), (signal.SIGUSR1, 75))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9), *SLOW])
def test_a_follower_that_is_stopped_goes_on(tmp_path: Path, job: Job, number: signal.Signals, code: int) -> None:
    """The command gets the signal, and what it was at is run again; of a follower that was killed it lives on."""
    root, pid = tmp_path / "run", tmp_path / "pid"
    save(root, 100, 200)
    job.does(
        f"if os.environ['STAGEREG_STEP'] == '200' and not os.path.exists({str(pid)!r}):\n"
        f"    with open({str(pid)!r}, 'w') as file:\n"  # a finalizer's close swallows a Ctrl-C
        "        file.write(str(os.getpid()))\n"
        f"    time.sleep({LIMIT_S})\n"
    )
    with following(root, job) as follower:
        until(lambda: pid.exists() and pid.read_text())
        follower.send_signal(number)
        assert follower.wait(LIMIT_S) == code
        said = follower.stderr.read() if number != signal.SIGKILL and follower.stderr else ""
    if number == signal.SIGKILL:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    else:
        assert f"stopped by {number.name}" in said
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    save(root, 300)
    with following(root, job, "--idle", "0") as follower:
        assert follower.wait(LIMIT_S) == 0
    assert job.steps == [100, 200, 200, 300]


@pytest.mark.slow
def test_a_second_follower_of_one_name_is_refused(tmp_path: Path, job: Job, command: Command) -> None:
    root = tmp_path / "run"
    save(root, 100)
    with following(root, job) as follower:
        until(lambda: job.steps)
        seen = command("follow", root, "--idle", "0", *job.command, code=2)
        assert f" under the name '{Path(sys.executable).name}-job.py'. Stop that process" in seen.err
        assert f"process {follower.pid} on" in seen.err
        command("follow", root, "--idle", "0", "--name", "mine", *job.command)
    assert job.steps == [100, 100]


def test_what_is_read_is_kept_and_what_went_before_is_named(tmp_path: Path, job: Job) -> None:
    root, gate = tmp_path / "run", tmp_path / "gate"
    job.does(f"while not os.path.exists({str(gate)!r}): time.sleep(0.02)\nassert os.listdir(sys.argv[2])")
    save(root, 100, 200, 300)
    with following(root, job, "--until-step", "400") as follower:
        until(lambda: job.steps == [100])
        store = open_store(root)
        with store.lock():
            assert store.readers.found().keys() == {"step-00000100"}
        shutil.rmtree(path_of(root, 200))
        gate.touch()
        until(lambda: job.steps == [100, 300])
        save(root, 400)
        said = follower.communicate(timeout=LIMIT_S)[1]
        assert follower.returncode == 0
    assert job.steps == [100, 300, 400]
    assert "step-00000200 was deleted before the command ran" in said
    assert store.readers.found() == {}


def test_notes_can_lie_elsewhere_and_are_data(tmp_path: Path, job: Job, command: Command) -> None:
    root, notes = tmp_path / "run", tmp_path / "notes"
    save(root, 100)
    options = ("follow", root, "--idle", "0", "--state", notes)
    command(*options, *job.command)
    assert not [path for path in root.iterdir() if path.name.startswith(".follow")]
    noted: Any = json.loads((notes / "done.json").read_text())
    assert list(noted["done"].values()) == ["done"]
    shutil.rmtree(path_of(root, 100))
    save(root, 200)  # with the serial of the one that was deleted
    command(*options, *job.command)
    assert job.steps == [100, 200]
    (notes / "done.json").write_text("{")
    assert "done.json: " in command(*options, *job.command, code=2).err


def test_what_cannot_work_is_refused_at_once(tmp_path: Path, command: Command) -> None:
    root = tmp_path / "run"
    save(root, 100)
    for arguments, said in (
        (("--", "no-such-command"), "command not found: 'no-such-command'"),
        (("--name", "a/b", "--", "true"), "--name='a/b'"),
        (("--retries", "-1", "--", "true"), "--retries"),
        ((), "command"),
    ):
        assert said in command("follow", root, *arguments, code=2).err
    assert "fsspec does not support nothing://" in command("follow", "nothing://bucket/x", "--", "true", code=2).err
    command("follow", tmp_path / "never", "--idle", "0", "--", "true")
    assert not (tmp_path / "never").exists()
    assert open_store(root).leftovers() == []
