"""One-line descriptions of crashed processes, from the output of ``faulthandler`` and ``traceback``."""

from __future__ import annotations

import re

from stagereg.base.crash_report import is_foreign


def innermost_frame(dump: str) -> str:
    """Return the innermost frame of user code in a ``faulthandler`` dump, such as ``"stage (mine.py:7)"``, or ``""``.

    The current thread is searched first. Frames of Python, torch, pytest and stagereg are a last resort.
    """
    frames = re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump[max(dump.rfind("Current thread"), 0) :], re.M)
    frames += re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump, re.M)
    own = [frame for frame in frames if not is_foreign(frame[0])]
    return next((f"{function} ({file}:{line})" for file, line, function in own or frames), "")


def summarize(text: str) -> str:
    """Shorten a rank's text in ``RankFailure.failed`` to one line: the error, or the signal with the crashed frame."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no result"]
    if "before it returned" not in lines[0]:
        return lines[-1]  # last line of a traceback
    uncaught = [line for line in lines[1:] if line.startswith("what():")]
    errors = [line for line in lines[1:] if re.search(r"error", line, re.IGNORECASE)]
    summary = ": ".join([lines[0], *(uncaught or errors)[-1:]])
    frame = innermost_frame(text)
    return f"{summary}, in {frame}" if frame else summary
