"""The page prove.md shows what its commands print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from ...support.pages import Page
from ...support.programs import LIMIT_S


def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    page = Page("prove.md")
    [program] = page.of("python")
    (tmp_path / "train.py").write_text(program)
    for command in page.consoles():
        start = [sys.executable, "-m", "stagereg"] if command.line.startswith("stagereg") else [sys.executable]
        words = [sys.executable if word == "python" else word for word in shlex.split(command.line)[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT_S}
        done = subprocess.run([*start, *words], check=False, **how)  # type: ignore[call-overload]
        assert done.returncode == ("--mistake" in words), done.stderr
        command.check(done.stdout)
