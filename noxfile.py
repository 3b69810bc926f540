"""Tests with other versions of torch and Python, and the release: the last part of ``make nightly``.

Each session has its own environment, which is deleted afterwards. If an interpreter, a build of torch or disk space is
missing, the session is skipped and does not fail.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

LOWEST = "torch==2.11.*"  # as in pyproject.toml
PINNED = "torch==2.13.0"  # as in constraints.txt
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SMALL = ["train.steps=6", "train.eval_every=3", "checkpoint.every=3", "model.layers=1", "data.files=4"]
ROOM = 12 << 30  # bytes; without access to CPU_INDEX, pip installs a build with CUDA

nox.options.error_on_missing_interpreters = False


def run_tests(session: nox.Session, torch: str) -> None:
    try:
        if shutil.disk_usage(".").free < ROOM:
            session.skip(f"less than {ROOM >> 30} GiB are free on the disk")
        try:
            session.install(torch, "--extra-index-url", CPU_INDEX)
        except CommandFailed:
            session.skip(f"pip finds no {torch} here")
        session.install("--editable", ".[dev,report]")
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


@nox.session
def release(session: nox.Session) -> None:
    """Build a wheel and a source distribution in ``dist``, check both, and test the latter outside the checkout.

    The commands in README run there, and type checkers check a program that uses the public names.
    """
    root = Path.cwd()
    shutil.rmtree(root / "dist", ignore_errors=True)
    session.install("build", "twine", "check-wheel-contents")
    session.run("python", "-m", "build", "--quiet")
    wheel, source = next(root.glob("dist/*.whl")), next(root.glob("dist/*.tar.gz"))
    session.run("twine", "check", "--strict", str(wheel), str(source))
    session.run("check-wheel-contents", str(wheel))
    session.install(PINNED, "--extra-index-url", CPU_INDEX)
    session.install(f"{source}[report]", "mypy", "pyright[nodejs]")
    session.chdir(session.create_tmp())
    shutil.rmtree("demo", ignore_errors=True)
    shutil.copy(root / "tests/typed/program.py", ".")
    session.run("mypy", "--strict", "program.py")
    session.run("pyright", "program.py")
    session.run("stagereg", "new", "program", "demo")
    session.chdir("demo")
    commands = re.findall(r"^((?:python|torchrun) .*?train\.py.*?)(?: *#.*)?$", (root / "README.md").read_text(), re.M)
    for command in commands:
        # With join.throw=true, data=uneven ends with an error, as documented in README.
        codes = [1] if "join.throw" in command else [0]
        session.run(*command.split(), *SMALL, success_codes=codes, env={**os.environ, "OMP_NUM_THREADS": "1"})
    shutil.rmtree(session.virtualenv.location)
