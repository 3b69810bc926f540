"""A process that imports torch once, which takes seconds, and does nothing with it: each command is a copy of it.

This file run as a program is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path


class ForkServer:
    """Runs commands of ``python`` in copies of one process.

    Args:
        printed: a file for what a command prints, on either stream.
        env: the environment of all of them.
    """

    def __init__(self, printed: Path, env: dict[str, str]) -> None:
        self._printed = printed
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, text=True, start_new_session=True, **pipes
        )

    def run(self, arguments: list[str], folder: Path) -> tuple[int, str]:
        """Do what ``python`` does with these arguments; return the exit code and what was printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, str(folder), str(self._printed)]) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        assert code, f"the server did not answer: {arguments}"
        return int(code), self._printed.read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


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


if __name__ == "__main__":
    serve()
