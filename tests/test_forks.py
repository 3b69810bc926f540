"""A program in a fork sees, prints and ends as one that is started from a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .support.forks import run_forked

SHOWS = """
import atexit, os, sys
print(sys.argv, sys.orig_argv[1:], os.getcwd(), sys.stdin.read(), os.environ["CHEESE"])
print(__name__, "__file__" in globals())
atexit.register(print, "at the end")
sys.stderr.write("said")
sys.exit(5)
"""


@pytest.mark.parametrize("is_file", [False, True])
def test_it_is_as_in_a_shell(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    environment = {**os.environ, "CHEESE": "none"}
    command = [sys.executable, *(["shows.py"] if is_file else ["-c", SHOWS]), "a", "b c"]
    how = {"cwd": tmp_path, "env": environment, "input": "given", "capture_output": True, "text": True}
    real = subprocess.run(command, check=False, **how)  # type: ignore[call-overload]
    program = Path("shows.py") if is_file else SHOWS
    forked = run_forked(program, "a", "b c", cwd=tmp_path, given="given", environment=environment)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert (real.returncode, real.stderr, "at the end\n" in real.stdout) == (5, "said", True)


def test_errors_and_signals_end_it_alone() -> None:
    failed = run_forked("1 / 0")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    assert run_forked("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked("import time; time.sleep(600)", timeout_s=0.2)
    assert run_forked("print('next')").stdout == "next\n"
