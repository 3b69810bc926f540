"""Calls a function in a child process, so that one that crashes, hangs or ends its process costs only its result.

The child has the module path of this process, leads a session of its own, and ends with this process. Its output is
kept apart. If it hangs, ``faulthandler`` dumps its stack. Unlike ``run_ranks``, neither side needs torch.
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
_GRACE_S = 2.0  # seconds that a process that hangs gets to dump its stack


def call_in_child(
    function: str,
    *arguments: str,
    limit_s: float,
    start_s: float = 0.0,
    progress: Callable[[], tuple[object, float]] = lambda: (None, 0.0),
) -> tuple[Any, str]:
    """Call ``"package.module:name"``; return what it returned, as JSON has it, or ``None`` and how it ended, and where.

    The child and all that it has started are gone then.

    Args:
        limit_s: seconds that it may take.
        start_s: seconds in place of ``limit_s`` until the first progress, if they are more.
        progress: asked several times a second; each time what it returns has changed, the seconds begin anew, with as
            many more as are second in it.
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
                process.send_signal(signal.SIGABRT)  # faulthandler dumps the stacks
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
        return f"still running after {limit_s:g} s: stuck{where or ' in code that is not Python'}"
    if code < 0:
        return f"crashed with {signal_name(-code)}{where}"
    last = next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")
    return f"ended the process with exit code {code}" + (f"; its last output: {last}" if last else "")


def answer(parent: int, file: str, function: str, *arguments: str) -> None:
    """Call ``function`` and write what it returned, or why it did not, to ``file``: the child's part."""
    end_with(parent)
    faulthandler.enable()
    module, _, name = function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(*arguments), ""
    except StageregError as error:
        result = None, str(error)
    except (Exception, SystemExit) as error:
        result = None, summarize_exception(error, __file__)
    Path(file).write_text(json.dumps(result))  # read only after exit code 0
    sys.stdout.flush()
    os._exit(0)  # threads that were left behind must not hold it up
