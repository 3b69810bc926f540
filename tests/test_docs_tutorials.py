"""The tutorials: every file of them is written, every command run, and what it prints is what the page has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .support.app import App
from .support.pages import Page, commands

ROOT = Path(__file__).parents[1]
INSTALLED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "stagereg", "conf", "examples")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "count"), [("plugins.md", 9), ("plugin-kinds.md", 6), ("tutorial.md", 12)])
def test_every_command_of_a_tutorial_prints_what_it_shows(tmp_path: Path, name: str, count: int) -> None:
    """In an empty folder beside a copy of the checkout; pip installs into another one."""
    page, work, site = Page(name), tmp_path / "work", tmp_path / "site"
    work.mkdir()
    site.mkdir()
    (tmp_path / "stagereg").mkdir()
    for each in INSTALLED:
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
        copy(ROOT / each, tmp_path / "stagereg" / each)
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(site)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **offline, "PATH": path, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    seen = 0
    for language, text in page.blocks:
        if language != "console":
            file = re.fullmatch(r"# ([\w/]+\.(py|yaml))", text.partition("\n")[0])
            assert file, text
            App(work, {file[1]: text})
            continue
        for command in commands(text):
            line = re.sub("^stagereg", "python -m stagereg", command.line)
            ended = subprocess.run(["bash", "-c", line], cwd=work, env=env, timeout=200, **pipes)
            command.check("".join(f"{each.rstrip()}\n" for each in ended.stdout.splitlines()))
            seen += 1
    assert seen >= count
