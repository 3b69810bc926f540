"""``stagereg prove`` on programs that cannot be proven: it says why, ends in time, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..support.programs import LIMIT_S

PROGRAM = """
import os, shutil, sys, time, torch, stagereg
what = sys.argv[1] if "STAGEREG_PROVE" in os.environ else "record"
steps = int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
if what == "crash":
    raise RuntimeError("no such data set")
checkpointer = stagereg.Checkpointer("run", every=4, keep=9, prove=stagereg.Prove(steps=3))
start = 0 if what == "forget" else checkpointer.restore(state) or 0
if what == "hang":
    print(f"child {os.getpid()}", flush=True)
    time.sleep(600)
if what == "gone":
    shutil.rmtree(os.path.join(sys.argv[3], "run"))
with checkpointer:
    for step in range(start + 1, start + 1 if what == "end" else steps + 1):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        if what == "fail" and step == start + 2:
            raise RuntimeError("out of memory")
        if what == "save":
            checkpointer.save(step, state, everywhere=True)
            checkpointer.wait()
            assert checkpointer.stats.saves == 0
        checkpointer.maybe_save(step, state)
"""


class Proof(NamedTuple):
    code: int
    found: dict[str, Any]
    printed: str


class Program:
    """A program in a folder that has run for some steps."""

    def __init__(self, folder: Path, steps: int = 12) -> None:
        self.folder = folder
        (folder / "train.py").write_text(textwrap.dedent(PROGRAM))
        self.run([sys.executable, "train.py", "record", str(steps)])

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def prove(self, what: str, *options: str, steps: int = 12) -> Proof:
        command = [sys.executable, "-m", "stagereg", "prove", "run", "--json", *options, "--"]
        done = self.run([*command, sys.executable, "train.py", what, str(steps), str(self.folder)])
        found = json.loads(done.stdout)["checkpoints"] if done.stdout else [{}]
        return Proof(done.returncode, found[0] if found else {}, done.stderr)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("proven"))


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("step-*/*")}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "crash",
            "exited with code 1 and did not restore the checkpoint with restore(state); its last output: Runtime",
        ),
        (
            "forget",
            "exited with code 0 and did not restore the checkpoint with restore(state); its last output: nothing",
        ),
        ("fail", "exited with code 1 before it took all steps; its last output: RuntimeError: out of memory"),
    ],
)
def test_a_program_that_cannot_be_started_again_says_what_stopped_it(what: str, words: str, program: Program) -> None:
    proof = program.prove(what)
    assert (proof.code, proof.found["verdict"]) == (2, "not tried")
    assert words in proof.found["why"]


def test_a_program_that_hangs_is_ended_with_its_processes(program: Program) -> None:
    proof = program.prove("hang", "--timeout=8")
    assert proof.code == 2
    assert "did not end in 8 s (--timeout) before it took all steps; its last output: child" in proof.found["why"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(proof.found["why"].rpartition(" ")[2]), 0)
    assert not [*program.folder.glob("run/.prove-*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_proof_ends_the_program(number: signal.Signals, program: Program) -> None:
    command = [sys.executable, "-m", "stagereg", "prove", "run", "--", sys.executable, "train.py", "hang", "12"]
    process = subprocess.Popen(command, cwd=program.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until, child = time.monotonic() + LIMIT_S, ""
        while not child and time.monotonic() < until:
            printed = [each.read_text() for each in program.folder.glob("run/.prove-*/printed")]
            child = "".join(printed).partition("child ")[2].strip()
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(LIMIT_S) in (128 + number, 130)
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)
    finally:
        process.kill()
        process.communicate()
    assert not [*program.folder.glob("run/.prove-*")]


def test_a_checkpoint_directory_that_is_deleted_during_the_proof_is_not_refuted(tmp_path: Path) -> None:
    proof = Program(tmp_path).prove("gone")
    assert proof.code == 2
    assert "Traceback" not in proof.printed


def test_a_run_with_fewer_steps_left_is_proven_for_these_steps(tmp_path: Path) -> None:
    program = Program(tmp_path, steps=9)
    proof = program.prove("healthy", "--latest", steps=9)
    assert (proof.code, proof.found["step"], proof.found["steps"]) == (0, 8, 1)
    assert "The run took only 1 of 3 steps after the save." in proof.found["remarks"]
    proof = program.prove("healthy", steps=9)  # by default, the newest checkpoint with all steps
    assert (proof.code, proof.found["step"], proof.found["steps"]) == (0, 4, 3)
    proof = program.prove("end", steps=9)
    assert (proof.code, proof.found["first"]["kind"]) == (1, "step")
    assert proof.found["likely"] == "the program ends earlier than the run did. Start it with the same number of steps."


def test_a_proof_changes_no_checkpoint_and_follows_no_save_of_the_program(program: Program) -> None:
    before = tree(program.folder)
    assert program.prove("save").code == 0
    assert tree(program.folder) == before
    assert sorted(path.name for path in program.folder.iterdir()) == ["run", "train.py"]


def test_another_version_of_torch_is_said_in_the_verdict(program: Program) -> None:
    note = program.folder / "run" / "proofs" / "step-00000008.json"
    before = json.loads(note.read_text())
    note.write_text(json.dumps(before | {"torch": "1.0"}))
    proof = program.prove("healthy")
    note.write_text(json.dumps(before))
    assert proof.code == 0
    assert any(each.startswith("The run used torch 1.0, and the proof torch 2.") for each in proof.found["remarks"])


def test_all_checkpoints_are_proven_and_the_run_is_followed_to_its_end(program: Program) -> None:
    command = [sys.executable, "-m", "stagereg", "prove", "run", "--json", "--all", "--"]
    done = program.run([*command, sys.executable, "train.py", "healthy", "12"])
    found = json.loads(done.stdout)["checkpoints"]
    assert [(each["step"], each["verdict"]) for each in found] == [(8, "proven"), (4, "proven")]
    proof = program.prove("healthy", "--follow", "--after-run")
    assert (proof.code, proof.found) == (0, {})  # each has its verdict


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--", "no-such-program"], "command not found: 'no-such-program'"),
        (["empty", "--", "true"], "There is no checkpoint in empty"),
        (["run", "--nproc=2", "--", "true"], "--nproc needs a program under stagereg.main"),
    ],
)
def test_an_invalid_request_has_exit_code_2(arguments: list[str], words: str, program: Program) -> None:
    done = program.run([sys.executable, "-m", "stagereg", "prove", *arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_rank_without_a_record_prevents_a_verdict(tmp_path: Path) -> None:
    program = Program(tmp_path)
    (tmp_path / "run" / "proofs" / "step-00000008.rank0.json").write_text("{")
    assert program.prove("healthy").found["step"] == 4
    proof = program.prove("healthy", "--all")
    assert [proof.code, proof.found["step"]] == [0, 4]


def test_a_run_without_tensors_is_not_called_proven(tmp_path: Path) -> None:
    program = (
        "import stagereg\n"
        "with stagereg.Checkpointer('run', every=4, prove=stagereg.Prove(steps=3)) as checkpointer:\n"
        "    state = {'count': 0}\n"
        "    for step in range((checkpointer.restore(state) or 0) + 1, 9):\n"
        "        state['count'] += 1\n"
        "        checkpointer.maybe_save(step, state)\n"
    )
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "train.py"]
    how: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": LIMIT_S}
    subprocess.run(command, check=True, **how)
    done = subprocess.run([sys.executable, "-m", "stagereg", "prove", "run", "--", *command], check=False, **how)
    assert done.returncode == 2
    assert "the run recorded no tensors" in done.stdout
