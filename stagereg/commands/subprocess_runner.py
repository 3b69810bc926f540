"""Runs functions in child processes, so that what crashes, exits or hangs there costs the parent only a result.

A child runs one function of an importable module, has the module path of this process, and writes what the function
returns as JSON into a file; what it prints is kept out of the output of this process. It is the leader of a session of
its own, and whatever it started ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stagereg.crash_report import innermost_frame, signal_name
from stagereg.errors import StageregError

__all__ = ["SubprocessResult", "SubprocessRunner", "answer"]

_GRACE_S = 2.0
"""Seconds that a process that hung gets to dump its stack."""


@dataclass(frozen=True)
class SubprocessResult:
    """What came of a question.

    Attributes:
        value: what the function returned; ``None`` if it did not.
        failure: how it ended instead, and where; empty if it returned.
    """

    value: Any = None
    failure: str = ""


class SubprocessRunner:
    """Asks; leaving it ends every child that is still at work. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work: set[int] | None = set()

    def __enter__(self) -> SubprocessRunner:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            pids, self._at_work = self._at_work or set(), None
            for pid in pids:
                _end(pid)

    def ask(self, question: str, arguments: Sequence[str], limit_s: float) -> SubprocessResult:
        """Run a function in a child process and return what became of it; never raises for the child's sake.

        Args:
            question: the function, ``"package.module:name"``.
            arguments: it is called with.
            limit_s: seconds that the child may take, its start included.
        """
        with tempfile.TemporaryDirectory(prefix="stagereg-") as folder:
            file, noise = Path(folder, "result.json"), Path(folder, "noise")
            with noise.open("wb") as printed:
                child = self._start([str(file), question, *arguments], printed)
                if child is None:
                    return SubprocessResult(failure="was not asked any more")
                try:
                    ended = _wait(child, limit_s)
                finally:
                    self._finish(child)
            if file.exists():
                with contextlib.suppress(ValueError):  # it was ended while it wrote
                    return SubprocessResult(**json.loads(file.read_text()))
            return SubprocessResult(failure=_ending(ended, limit_s, noise.read_text(errors="replace")))

    def _start(self, arguments: Sequence[str], printed: IO[bytes]) -> subprocess.Popen[bytes] | None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with self._lock:
            if self._at_work is None:
                return None
            child = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", _CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self._at_work.add(child.pid)
            return child

    def _finish(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._at_work is not None:
                self._at_work.discard(child.pid)
            _end(child.pid)  # what it has started, too
        child.wait()


def answer(file: str, question: str, *arguments: str) -> None:
    """Run ``question`` and write its :class:`SubprocessResult` to ``file``.

    The child's part of :class:`SubprocessRunner`.
    """
    module, _, name = question.partition(":")
    try:
        result = {"value": getattr(importlib.import_module(module), name)(*arguments)}
    except StageregError as error:
        result = {"failure": str(error)}
    except (Exception, SystemExit) as error:
        result = {"failure": f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # threads that were left behind must not hold it up


_CHILD = f"import sys; from {__name__} import answer; answer(*sys.argv[1:])"


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code, or ``None`` for a child that took too long and was made to dump its stack."""
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # faulthandler prints the stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        return None


def _ending(code: int | None, limit_s: float, noise: str) -> str:
    where_text = f" in {where}" if (where := innermost_frame(noise)) else ""
    if code is None:
        return f"did not end within {limit_s:g} s: stuck{where_text or ' in code that is not Python'}"
    if code < 0:
        return f"crashed with {signal_name(-code)}{where_text}"
    last = next((line for line in reversed(noise.splitlines()) if line.strip()), "")
    return f"ended the process with exit code {code}" + (f"; its last output: {last.strip()}" if last else "")
