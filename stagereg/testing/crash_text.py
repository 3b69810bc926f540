"""Describes crashed processes in one line, based on the output of ``faulthandler`` and ``traceback``."""

from __future__ import annotations

import re

from stagereg.base.crash_report import is_foreign


def innermost_frame(dump: str) -> str:
    """Return the innermost frame of user code in a ``faulthandler`` dump, such as ``"stage (mine.py:7)"``.

    The current thread is searched first. Without user code, return a frame of Python, torch, pytest or stagereg;
    without any frame, return an empty string.
    """
    frames = re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump[max(dump.rfind("Current thread"), 0) :], re.M)
    frames += re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump, re.M)
    own = [frame for frame in frames if not is_foreign(frame[0])]
    return next((f"{function} ({file}:{line})" for file, line, function in own or frames), "")


def summarize(text: str) -> str:
    """Shorten a failure report from ``RankFailure.failed`` to one line: the error, or the signal and crashed frame."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no result"]
    if "before it returned" not in lines[0]:
        return lines[-1]  # The report is a traceback, whose last line is the error.
    uncaught = [line for line in lines[1:] if line.startswith("what():")]
    errors = [line for line in lines[1:] if re.search(r"error", line, re.IGNORECASE)]
    summary = ": ".join([lines[0], *(uncaught or errors)[-1:]])
    frame = innermost_frame(text)
    return f"{summary}, in {frame}" if frame else summary
