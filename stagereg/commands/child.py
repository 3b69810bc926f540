"""Calls a function in a child process, so that its crash, hang or exit does not affect the caller.

The child has the ``sys.path`` of this process. It is the leader of a new session, and terminates when this process
terminates. Its output goes to a file. If it hangs, ``faulthandler`` dumps its stack. Unlike ``run_ranks``, it does not
need torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
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

from stagereg.base.crash_report import signal_name, summarize_exception
from stagereg.base.machine import end_with
from stagereg.errors import StageregError
from stagereg.testing.crash_text import innermost_frame

_CHILD = f"import sys; from {__name__} import answer; answer(int(sys.argv[1]), *sys.argv[2:])"
_GRACE_S = 2.0  # seconds that a hanging process gets to dump its stack


def call_in_child(
    function: str,
    *arguments: str,
    limit_s: float,
    start_s: float = 0.0,
    progress: Callable[[], tuple[object, float]] = lambda: (None, 0.0),
) -> tuple[Any, str]:
    """Call ``"package.module:name"`` in a child process. Return (result, ``""``), or (``None``, the failure).

    The function must return a JSON value. On return, the child and all processes that it started have terminated.

    Args:
        limit_s: time limit in seconds.
        start_s: time limit in seconds until the first progress, if longer than ``limit_s``.
        progress: a function that is called several times a second. If its result changes, the time limit begins again.
            The second item of the result is the number of seconds to add to the limit.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
        value, printed = Path(folder, "value.json"), Path(folder, "printed")
        with printed.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), str(value), function, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        try:
            seen, began, allowed_s = progress(), time.monotonic(), max(limit_s, start_s)
            while process.poll() is None and time.monotonic() < began + allowed_s:
                if (now := progress()) != seen:
                    seen, began, allowed_s = now, time.monotonic(), limit_s + now[1]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            code = process.poll()
            if code is None:
                process.send_signal(signal.SIGABRT)  # so that faulthandler dumps the stacks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code == 0 and value.exists():
            result, failure = json.loads(value.read_text())
            return result, failure
        return None, _ending(code, allowed_s, printed.read_text(errors="replace"))


def _ending(code: int | None, limit_s: float, printed: str) -> str:
    where = f" in {frame}" if (frame := innermost_frame(printed)) else ""
    if code is None:
        return f"still running after {limit_s:g} s: stuck{where or ' outside Python code'}"
    if code < 0:
        return f"crashed with {signal_name(-code)}{where}"
    last = next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")
    return f"terminated the process with exit code {code}" + (f"; last line of output: {last}" if last else "")


def answer(parent: int, file: str, function: str, *arguments: str) -> None:
    """In the child process, call ``function``, and write its result or its error to ``file``."""
    end_with(parent)
    faulthandler.enable()
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*arguments), ""
    except StageregError as error:
        result = None, str(error)
    except (Exception, SystemExit) as error:
        result = None, summarize_exception(error, __file__)
    Path(file).write_text(json.dumps(result))  # the parent reads it only after exit code 0
    sys.stdout.flush()
    os._exit(0)  # exits without waiting for running threads
