"""Calls a function in a child process, so that one that crashes, hangs or ends its process costs only its result.

The child has the module path of this process and leads a session of its own. It ends with this process, however that
ends. What it prints is kept out of this process's output. If it hangs, ``faulthandler`` dumps its stack,
which needs no cooperation of the thread that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagereg.crash_report import innermost_frame, signal_name, summarize_exception
from stagereg.errors import StageregError

__all__ = ["ChildCall", "answer"]

_CHILD = f"import sys; from {__name__} import answer; answer(*sys.argv[1:])"
_GRACE_S = 2.0
"""Seconds that a process that hangs gets to dump its stack."""


class ChildCall:
    """A call that has begun; to be used as a context, at whose end the child and all that it has started are gone.

    Args:
        function: ``"package.module:name"``; what it returns must be something that JSON has.
        arguments: it is called with.
    """

    def __init__(self, function: str, *arguments: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stagereg-")
        self._value, self._printed = Path(self._folder.name, "value.json"), Path(self._folder.name, "printed")
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(self._value), function, *arguments],
                stdin=subprocess.PIPE,  # closed by the end of this process
                stdout=printed,
                stderr=printed,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def __enter__(self) -> ChildCall:
        return self

    def __exit__(self, *raised: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()

    def result(
        self, limit_s: float, progress: Callable[[], object] = lambda: None, start_s: float = 0.0
    ) -> tuple[Any, str]:
        """Wait for the call; return what the function returned, or ``None`` and how it ended instead, and where.

        Args:
            limit_s: seconds that it may take.
            progress: asked several times a second; each time what it returns has changed, the seconds begin anew.
            start_s: seconds in place of ``limit_s`` until the first change, if they are more.
        """
        seen, deadline = progress(), time.monotonic() + max(limit_s, start_s)
        while self._process.poll() is None and time.monotonic() < deadline:
            if (now := progress()) != seen:
                seen, deadline = now, time.monotonic() + limit_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        code = self._process.poll()
        if code is None:
            self._process.send_signal(signal.SIGABRT)  # faulthandler dumps the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        elif code == 0 and self._value.exists():
            value, failure = json.loads(self._value.read_text())
            return value, failure
        return None, self._ending(code, limit_s)

    def _ending(self, code: int | None, limit_s: float) -> str:
        printed = self._printed.read_text(errors="replace")
        where = f" in {frame}" if (frame := innermost_frame(printed)) else ""
        if code is None:
            return f"still running after {limit_s:g} s: stuck{where or ' in code that is not Python'}"
        if code < 0:
            return f"crashed with {signal_name(-code)}{where}"
        last = next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")
        return f"ended the process with exit code {code}" + (f"; its last output: {last}" if last else "")


def answer(file: str, function: str, *arguments: str) -> None:
    """Call ``function`` and write what it returned, or why it did not, to ``file``: the child's part."""
    leash = os.dup(0)
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)  # its closing raises SIGIO, whose default is the end
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*arguments), ""
    except StageregError as error:
        result = None, str(error)
    except (Exception, SystemExit) as error:
        result = None, summarize_exception(error, __file__)
    written = Path(f"{file}.unfinished")
    written.write_text(json.dumps(result))
    written.rename(file)
    sys.stdout.flush()
    os._exit(0)  # threads that were left behind must not hold it up
