"""The tutorial on plugins: every file of it is written, every command run, and what it prints is what the page shows.

Most of its commands are a Python that imports torch, which takes seconds, so they are copies of one process.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .config.app import App
from .pages import Command, Page, commands
from .support.fork_server import ForkServer

PAGE = Page("plugins.md")
LONG = ("stagereg check", "python -m pytest")
"""Commands that start processes of their own, many of them."""


class Reader:
    """Follows the page in an empty folder; pip installs into another one."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder = folder
        site.mkdir()
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(site)}
        self.env = {**os.environ, **offline, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self.server = ForkServer(folder.parent / "printed", self.env)

    def write(self, text: str) -> None:
        """Write the file that a block begins with the name of."""
        name = re.fullmatch(r"# ([\w/]+\.(py|yaml))", text.partition("\n")[0])
        assert name, text
        App(self.folder, {name[1]: text})

    def run(self, line: str) -> str:
        """Run a command and return what it prints, on either stream."""
        arguments = shlex.split(line)
        if arguments[0] == "stagereg":
            arguments = ["python", "-m", *arguments]
        if arguments[0] != "python" or line.startswith(LONG):
            arguments = [sys.executable, *arguments[1:]] if arguments[0] == "python" else arguments
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            return subprocess.run(arguments, cwd=self.folder, env=self.env, timeout=200, check=False, **pipes).stdout
        _, printed = self.server.run(arguments[1:], self.folder)
        return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())

    def follow(self) -> Iterator[tuple[Command, str]]:
        """Go through the page; give each command with what it printed."""
        for language, text in PAGE.blocks:
            if language != "console":
                self.write(text)
                continue
            for command in commands(text):
                yield command, self.run(command.line)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "work").mkdir()
    reader = Reader(tmp_path / "work", tmp_path / "site")
    yield reader
    reader.server.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_page_prints_what_it_shows(reader: Reader) -> None:
    seen = []
    for command, printed in reader.follow():
        command.check(printed)
        seen.append(command.line.startswith(LONG))
    assert len(seen) >= 20
    assert sum(seen) >= 5
