"""Format exceptions for reports, with the innermost frame of user code, and return the names of signals."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import traceback
from pathlib import Path

from stagereg.errors import StageregError

_LINES = 30  # maximum lines of an exception's own text in a report

_PACKAGES = ("site-packages", "dist-packages")
_NOT_SAVED = re.compile(r"Step (\d+) was not saved")
_STEP = re.compile(r"^Step \d+|step-\d{8}(\.[0-9a-f]+\.tmp)?")
"""The step and its file names. Messages of saves that failed for the same reason differ only in these parts."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGSEGV"``, or ``"signal 35"`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def summarize_exception(error: BaseException, *but: str) -> str:
    """Return an exception's message and origin: ``"ValueError: x (mine.py:7)"``. Skips frames in the files ``but``."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    text = "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 2], "...", lines[-1]])
    place = place_of(error, *but)
    return f"{text} ({place})" if place else text


def place_of(error: BaseException, *but: str) -> str:
    """Return the origin of an exception, ``"mine.py:7"``; empty if unknown. Skips frames in the files ``but``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in but]
    own = [frame for frame in frames if not is_foreign(frame.filename)]
    # The text of a syntax error already names the file.
    here = own or [f for f in frames if not f.filename.startswith("<") and not isinstance(error, SyntaxError)]
    return f"{here[-1].filename}:{here[-1].lineno}" if here else ""


def format_error(error: BaseException) -> str:
    """Return the message of an error of this project, or the traceback of any other error, to show to the user."""
    if isinstance(error, StageregError) and os.environ.get("HYDRA_FULL_ERROR") != "1":
        return str(error)
    trace = error.__traceback__
    launch = Path(__file__).parents[1] / "launch"
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == launch:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def describe_after(error: BaseException, known: BaseException | None) -> str:
    """Return the message of ``error``, or one short line if the printed error ``known`` differs only in its step."""
    text, before = str(error), "" if known is None else str(known)
    step, other = _NOT_SAVED.match(text), _NOT_SAVED.match(before)
    if step is None or other is None or _STEP.sub("", text) != _STEP.sub("", before):
        return text
    return f"{step[0]}, for the same reason as step {other[1]}."


def is_foreign(file: str) -> bool:
    """Return whether a file belongs to Python, torch, pytest or stagereg."""
    packages = next((part for part in _PACKAGES if f"/{part}/" in file), "")
    standard = file.startswith(("<", sysconfig.get_path("stdlib"))) and not packages
    theirs = any(f"/{packages}/{name}/" in file for name in ("torch", "_pytest", "pluggy"))
    return standard or theirs or file.startswith(f"{Path(__file__).parents[1]}/")
