"""``stagereg run`` is torchrun that ends with the exit code of the rank that ended first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stagereg.base.machine import tunables

from ..support.forks import run_forked
from ..support.programs import comes_true

LIMIT_S = 100

PROGRAM = """
import os, signal, sys, time
assert int(os.environ["WORLD_SIZE"]) == 2 and "STAGEREG_KEEPS_CODE" in os.environ
if os.environ["RANK"] == "1":
    print("told", sys.argv[1:], flush=True)
    {act}
"""


RUN = ["run", "--standalone", "--nproc-per-node=2", "program.py"]
MAIN = "import runpy; runpy.run_module('stagereg', run_name='__main__', alter_sys=True)"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return stagereg(*RUN, *arguments, cwd=folder)


def stagereg(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As ``python -m stagereg``, with the variables for which it would else start itself once more."""
    environment = {**os.environ, **tunables(os.environ)}
    return run_forked(MAIN, *arguments, cwd=cwd, timeout_s=LIMIT_S, environment=environment)


@pytest.mark.parametrize(
    ("act", "code"),
    [
        pytest.param("sys.exit(75)", 75, id="is preempted"),
        pytest.param("os.kill(os.getpid(), 9)", 128 + 9, id="is killed", marks=pytest.mark.slow),
    ],
)
def test_the_code_is_that_of_the_rank_that_ended_first(act: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(act=act))
    ended = run(tmp_path, "-x", "--nproc-per-node=3", "lr=1")
    assert ended.returncode == code, ended.stderr
    assert "told ['-x', '--nproc-per-node=3', 'lr=1']" in ended.stdout
    assert ("Root Cause" in ended.stderr) is (code not in (0, 75))


def test_its_options_are_those_of_torchrun(tmp_path: Path) -> None:
    assert "--nproc-per-node" in stagereg("run", "--help", cwd=tmp_path).stdout


SIGNALLED = """
import os, signal, sys, time

def leave(*_):
    time.sleep(2)
    os._exit(75)

here = "rank" + os.environ["RANK"]
signal.signal(signal.{name}, leave)
open(here, "w").close()
while not all(map(os.path.exists, ("rank0", "rank1"))):
    time.sleep(0.01)
if here == "rank1":
    os.kill(os.getppid(), signal.{name})
time.sleep({LIMIT_S})
"""


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGUSR1"])
def test_ranks_leave_after_a_signal_in_their_own_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SIGNALLED.replace("{name}", name).replace("{LIMIT_S}", str(LIMIT_S)))
    ended = run(tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert "Traceback" not in ended.stderr


UNSTEPPED = """
import os, signal, sys, time
import stagereg

if sys.argv[1] == "stepped":
    import torch
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
here = "rank" + os.environ["RANK"]
open(here, "w").close()
while not all(map(os.path.exists, ("rank0", "rank1"))):
    time.sleep(0.01)
if here == "rank1":
    os.kill(os.getppid() if sys.argv[2] == "agent" else os.getpid(), signal.SIGTERM)
time.sleep({LIMIT_S})
"""


@pytest.mark.parametrize(
    ("steps", "to", "code"),
    [
        ("unstepped", "agent", 75),
        ("unstepped", "rank", 75),
        pytest.param("stepped", "agent", 143, marks=pytest.mark.slow),
        pytest.param("stepped", "rank", 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_the_first_step_ends_ranks_without_a_checkpointer_with_75(
    steps: str, to: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(UNSTEPPED.replace("{LIMIT_S}", str(LIMIT_S)))
    ended = run(tmp_path, steps, to)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("preempted by SIGTERM before the first step") == (code == 75)


def catches(pid: int, number: int) -> bool:
    [caught] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_waits_for_others(tmp_path: Path) -> None:
    """The ranks are started when all machines are there; until then a job that is preempted must not hang."""
    (tmp_path / "program.py").write_text("")
    others = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "stagereg", "run", *others, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            assert comes_true(lambda: catches(launcher.pid, signal.SIGTERM), LIMIT_S)
            launcher.terminate()
            launcher.communicate(timeout=LIMIT_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 75


IGNORED = """
import os, signal
for name in ("SIGINT", "SIGHUP", "SIGQUIT"):
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), getattr(signal, name))
"""


@pytest.mark.slow
def test_what_was_ignored_at_its_start_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IGNORED)
    shell = ["sh", "-c", 'trap "" INT HUP QUIT; exec "$0" "$@"']  # as nohup and & of a script do
    command = [*shell, sys.executable, "-m", "stagereg", *RUN]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    assert "Failed to register" not in ended.stderr


@pytest.mark.slow
def test_machines_that_do_not_find_each_other_are_told_where_and_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:  # nobody answers there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        where = ("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={port}")
        ended = stagereg("run", *where, "--rdzv-conf=timeout=1", "program.py", cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    (line,) = [each for each in ended.stderr.splitlines() if each.startswith("stagereg: ")]
    assert "the machines of this run cannot connect" in line
    assert f"(127.0.0.1, {port})" in line
    assert "--master-addr" in line
    assert "Traceback" not in ended.stderr
