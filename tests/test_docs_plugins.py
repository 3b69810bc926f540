"""The tutorial on plugins: every file of it is written, every command run, and what it prints is what the page has."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .config.app import App
from .pages import Page, commands

PAGE = Page("plugins.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    """In an empty folder; pip installs into another one."""
    work, site = tmp_path / "work", tmp_path / "site"
    work.mkdir()
    site.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(site)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **offline, "PATH": path, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    seen = 0
    for language, text in PAGE.blocks:
        if language != "console":
            name = re.fullmatch(r"# ([\w/]+\.(py|yaml))", text.partition("\n")[0])
            assert name, text
            App(work, {name[1]: text})
            continue
        for command in commands(text):
            line = shlex.split(re.sub("^stagereg", "python -m stagereg", command.line))
            ended = subprocess.run(line, cwd=work, env=env, timeout=200, **pipes)
            command.check("".join(f"{each.rstrip()}\n" for each in ended.stdout.splitlines()))
            seen += 1
    assert seen >= 27
