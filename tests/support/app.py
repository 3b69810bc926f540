"""An app in its own folder, run as a user runs it: many command lines in one process where that is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .forks import run_forked

MANY_CALLS = str(Path(__file__).with_name("many_calls.py"))

STAGER = """
class Mine:
    should_synchronize_after_execute = True
    def __init__(self, slots: int = 2): self.slots = slots
    def stage(self, state_dict): return state_dict
    def synchronize_staging(self): ...
    def close(self): ...
"""
"""A stager of one option, as text."""


class App:
    """An app in a folder; what lies in ``site`` there is installed for it.

    Args:
        folder: where it is.
        files: texts by path.
        python: the interpreter that runs it.
    """

    def __init__(self, folder: Path, files: dict[str, str], python: str | Path = sys.executable) -> None:
        self.folder, self.python = folder, str(python)
        for path, text in files.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def run(
        self, *arguments: str, script: str = "app.py", given: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, script, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "site"), **env},
            input=given,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def fork(
        self, *arguments: str, script: str = "app.py", given: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """As ``run``, in a process that has imported torch and Hydra already, if it is of this Python."""
        if self.python != sys.executable:
            return self.run(*arguments, script=script, given=given, **env)
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "site"), **env}
        how: dict[str, Any] = {"cwd": self.folder, "given": given, "timeout_s": 200, "environment": environment}
        how["forks_ranks"] = True
        return run_forked(Path(script), *arguments, **how)

    def run_each(self, *lines: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
        """Run each command line, one after the other in one process."""
        return self.run_many([("app.py", line) for line in lines])

    def run_many(self, lines: Sequence[tuple[Any, ...]]) -> list[subprocess.CompletedProcess[str]]:
        """As ``run_each``, of scripts with their arguments, and of what a shell is to complete."""
        return self._ended(self.fork(script=MANY_CALLS, given=json.dumps(lines)))

    def _ended(self, done: subprocess.CompletedProcess[str]) -> list[subprocess.CompletedProcess[str]]:
        assert done.returncode == 0, done.stderr
        return [subprocess.CompletedProcess(*ended) for ended in json.loads(done.stdout)]

    def prints(self, *arguments: str, script: str = "app.py", **env: str) -> str:
        done = self.run(*arguments, script=script, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def prints_each(self, *lines: tuple[str, ...]) -> list[str]:
        done = self.run_each(*lines)
        assert [each.returncode for each in done] == [0] * len(lines), done
        return [each.stdout for each in done]

    def refuses(self, *arguments: str, script: str = "app.py") -> str:
        return self.refusal(self.fork(*arguments, script=script))

    def refusal(self, done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) <= 24  # one screen; Hydra's own list takes a line an option
        return done.stderr

    def completes(self, line: str, script: str = "app.py") -> list[str]:
        return self.prints("-sc", "query=bash", script=script, COMP_LINE=f"python {script} {line}").split()

    def completes_each(self, *lines: str) -> list[list[str]]:
        ask = ("-sc", "query=bash")
        asked = [("app.py", ask, f"python app.py {line}") for line in lines]
        done = self._ended(self.run(script=MANY_CALLS, given=json.dumps(asked)))  # in a process without torch
        assert [each.returncode for each in done] == [0] * len(lines), done
        return [each.stdout.split() for each in done]
