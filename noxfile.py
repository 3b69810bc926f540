"""The tests on other versions of torch and of Python, the last part of ``make nightly``.

Each session has an environment of its own, which is removed afterwards. What cannot be had, an interpreter, a build of
torch or the room on the disk, is a printed line and no failure.
"""

from __future__ import annotations

import shutil

import nox
from nox.command import CommandFailed

LOWEST = "torch==2.11.*"  # as in pyproject.toml
PINNED = "torch==2.13.0"  # as in constraints.txt
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ROOM = 12 << 30  # bytes; where CPU_INDEX is not reached, pip installs a build with CUDA

nox.options.error_on_missing_interpreters = False


def run_tests(session: nox.Session, torch: str) -> None:
    try:
        if shutil.disk_usage(".").free < ROOM:
            session.skip(f"less than {ROOM >> 30} GiB are free on the disk")
        try:
            session.install(torch, "--extra-index-url", CPU_INDEX)
        except CommandFailed:
            session.skip(f"pip finds no {torch} here")
        session.install("--editable", ".[dev]")
        session.run("python", "-c", "import sys, torch; print('Python', sys.version, 'torch', torch.__version__)")
        session.run("pytest", "-m", "not slow", "--numprocesses", "2", env={"OMP_NUM_THREADS": "1"})
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session
@nox.parametrize("version", [LOWEST, "torch"], ids=["lowest", "highest"])
def torch(session: nox.Session, version: str) -> None:
    run_tests(session, version)


@nox.session(python=["3.12", "3.13", "3.14"])
def python(session: nox.Session) -> None:
    run_tests(session, PINNED)
