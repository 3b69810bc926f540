"""The tutorial on plugins: every file of it is written, every command run, and what it prints is what the page shows.

Most of its commands are a Python that imports torch, which takes seconds. So one process imports it once and does
nothing with it, and each command is a copy of that process: this file run as a program is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plugins.md"
LONG = ("stagereg check", "python -m pytest")
"""Commands that start processes of their own, many of them."""


def serve() -> None:
    """Run each line of stdin, a command as JSON, in a copy of this process; answer with its exit code."""
    import hydra  # noqa: F401
    import torch.distributed.checkpoint
    import torch.nn.parallel  # noqa: F401

    for line in sys.stdin:
        arguments, folder, out = json.loads(line)
        child = os.fork()
        if not child:
            os.chdir(folder)
            opened = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, 1)
            os.dup2(opened, 2)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os._exit(python(arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def python(arguments: list[str]) -> int:
    """Do what ``python`` does with these arguments; return its exit code."""
    code = 0
    try:
        if arguments[0] == "-c":
            sys.argv, sys.path[0] = ["-c"], os.getcwd()
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@dataclass
class Command:
    """A line after ``$`` and the output that the page shows."""

    line: str
    shown: str

    def fits(self, printed: str) -> bool:
        """Whether ``printed`` is what the page shows, line by line; ``...`` stands for anything."""
        lines = ["(?:.*\n)*" if line == "..." else f"{_pattern(line)}\n" for line in self.shown.splitlines()]
        return re.fullmatch("".join(lines), printed) is not None


def _pattern(line: str) -> str:
    return re.escape(line.rstrip()).replace(re.escape("..."), ".*")


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
        self.printed = folder.parent / "printed"
        site.mkdir()
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": str(site)}
        self.env = {**os.environ, **offline, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

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
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.printed.unlink(missing_ok=True)
        self.server.stdin.write(json.dumps([arguments[1:], str(self.folder), str(self.printed)]) + "\n")
        self.server.stdin.flush()
        assert self.server.stdout.readline().strip(), f"the server did not answer: {line}"
        return "".join(f"{line.rstrip()}\n" for line in self.printed.read_text().splitlines())

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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(reader.server.pid, signal.SIGKILL)
    reader.server.communicate()


@pytest.mark.slow
def test_every_file_is_written_and_every_quick_command_prints_what_the_page_shows(reader: Reader) -> None:
    seen = 0
    for command, printed in reader.follow(skip=LONG):
        assert command.fits(printed), f"$ {command.line}\n{printed}\n-- the page shows\n{command.shown}"
        seen += 1
    assert seen >= 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_checks_and_tests_of_the_page_end_as_it_shows(reader: Reader) -> None:
    seen = 0
    for command, printed in reader.follow():
        assert command.fits(printed), f"$ {command.line}\n{printed}\n-- the page shows\n{command.shown}"
        seen += command.line.startswith(LONG)
    assert seen >= 5


def test_every_block_is_a_file_or_a_console() -> None:
    for language, text in blocks():
        assert language in ("python", "yaml", "console"), text
        first = text.partition("\n")[0]
        assert (
            re.fullmatch(r"\$ .+", first) if language == "console" else re.fullmatch(r"# [\w/]+\.(py|yaml)", first)
        ), first


def test_the_links_of_the_page_have_targets() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link


@pytest.mark.parametrize(
    ("printed", "fits"), [("a 1 b\nx\ny\nc\n", True), ("a 1 b\nc\n", True), ("a b\nc\nd\n", False)]
)
def test_dots_stand_for_anything_and_nothing_else_does(printed: str, fits: bool) -> None:
    assert Command("", "a ... b\n...\nc\n").fits(printed) == fits


if __name__ == "__main__":
    serve()
