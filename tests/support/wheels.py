"""Builds what users install, and environments that have nothing else of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("stagereg", "hydra_plugins", "conf", "examples", "tests")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "outputs", "multirun", "*.so")


def plain() -> dict[str, str]:
    """The variables of this process, without a checkout on the path of imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = plain() | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, folder: Path, project: Path = ROOT, **variables: str) -> Path:
    """Build a wheel or an editable wheel from a copy of a project, so that no build leaves anything in it."""
    source = folder / "source"
    for each in project.iterdir():
        if each.is_file():
            source.mkdir(exist_ok=True)
            shutil.copy(each, source)
        elif project != ROOT or each.name in COPIED:
            shutil.copytree(each, source / each.name, ignore=LEFTOVERS)
    backend = f"import setuptools.build_meta as b; b.build_{kind}({str(folder)!r})"
    run(sys.executable, "-c", backend, cwd=source, **variables)
    return next(folder.glob("*.whl"))


def environment(folder: Path, *wheels: Path) -> Path:
    """A fresh virtual environment with these wheels in it, which borrows the dependencies installed here."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Borrowed by path, without running the .pth files there: an editable install here stays invisible.
    (site / "borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    return python
