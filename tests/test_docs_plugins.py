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
from typing import NamedTuple

import pytest

from .pages import fits
from .support.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plugins.md"
LONG = ("stagereg check", "python -m pytest")
"""Commands that start processes of their own, many of them."""


class Command(NamedTuple):
    """A line after ``$`` and the output that the page shows."""

    line: str
    shown: str


def blocks() -> list[tuple[str, str]]:
    """Language and text of every block of the page, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def commands(text: str) -> list[Command]:
    """The commands of a block."""
    return [Command(*part.partition("\n")[::2]) for part in re.split(r"^\$ ", text, flags=re.M)[1:]]


class Reader:
    """Follows the page in an empty folder; pip installs into another one."""

    def __init__(self, folder: Path, site: Path) -> None:
        self.folder = folder
        site.mkdir()
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(site)}
        self.env = {**os.environ, **offline, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self.server = ForkServer(folder.parent / "printed", self.env)

    def write(self, text: str) -> Path:
        """Write the file that a block begins with the name of."""
        name, _, _ = text.partition("\n")
        file = self.folder / name.removeprefix("# ")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

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

    def follow(self, skip: tuple[str, ...] = ()) -> Iterator[tuple[Command, str]]:
        """Go through the page; give each command with what it printed, but for those that begin with ``skip``."""
        for language, text in blocks():
            if language != "console":
                self.write(text)
                continue
            for command in commands(text):
                if not command.line.startswith(skip):
                    yield command, self.run(command.line)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "work").mkdir()
    reader = Reader(tmp_path / "work", tmp_path / "site")
    yield reader
    reader.server.close()


@pytest.mark.slow
def test_every_quick_command_prints_what_the_page_shows(reader: Reader) -> None:
    seen = 0
    for command, printed in reader.follow(skip=LONG):
        assert fits(command.shown, printed), f"$ {command.line}\n{printed}\n-- the page shows\n{command.shown}"
        seen += 1
    assert seen >= 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_checks_and_tests_of_the_page_end_as_it_shows(reader: Reader) -> None:
    seen = 0
    for command, printed in reader.follow():
        assert fits(command.shown, printed), f"$ {command.line}\n{printed}\n-- the page shows\n{command.shown}"
        seen += command.line.startswith(LONG)
    assert seen >= 5


def test_every_block_is_a_file_or_a_console() -> None:
    for language, text in blocks():
        assert language in ("python", "yaml", "console"), text
        first = text.partition("\n")[0]
        assert (
            re.fullmatch(r"\$ .+", first) if language == "console" else re.fullmatch(r"# [\w/]+\.(py|yaml)", first)
        ), first
