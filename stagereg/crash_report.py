"""How a process ended that was not to end, and where it was: in words, for those who tell an author of it.

Reads what the standard library's ``faulthandler`` and ``traceback`` have written. Starting, watching and ending
processes is left to those who do it.
"""

from __future__ import annotations

import re
import signal
import sysconfig
import traceback
from pathlib import Path

__all__ = ["innermost_frame", "signal_name", "summarize", "summarize_exception"]

_LINES = 30
"""Of an exception's own text; more would push everything else off a screen."""

_PACKAGES = ("site-packages", "dist-packages")


def signal_name(number: int) -> str:
    """The name of a signal, ``"SIGSEGV"``; those that have none, as most real-time ones, are called by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def innermost_frame(dump: str) -> str:
    """Where a plugin was when the stacks in ``dump`` were written, ``"stage (mine.py:7)"``; empty without a stack.

    Args:
        dump: what ``faulthandler`` wrote, innermost frames first. The thread that was running is asked first. Frames of
            Python's library, of torch and of stagereg say less than those of who called them.
    """
    frames = re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump[max(dump.rfind("Current thread"), 0) :], re.M)
    frames += re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', dump, re.M)
    own = [frame for frame in frames if not _is_foreign(frame[0])]
    return next((f"{function} ({file}:{line})" for file, line, function in own or frames), "")


def summarize_exception(error: BaseException, *but: str) -> str:
    """An exception and the line of the plugin that it came from, ``"ValueError: no licence (mine.py:7)"``.

    Args:
        error: that was caught.
        but: files whose frames are not looked at, such as the one that caught it.
    """
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    told = "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 2], "...", lines[-1]])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in but]
    own = [frame for frame in frames if not _is_foreign(frame.filename)]
    # An error of syntax says itself in which file it is.
    here = own or [f for f in frames if not f.filename.startswith("<") and not isinstance(error, SyntaxError)]
    return f"{told} ({here[-1].filename}:{here[-1].lineno})" if here else told


def summarize(text: str) -> str:
    """How a rank ended, in one line: its error, or the signal, the line of its last words that tells most, and where.

    Args:
        text: as in :attr:`stagereg.testing.RankFailure.failed`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no result"]
    if "before it returned" not in lines[0]:
        return lines[-1]  # of a traceback
    uncaught = [line for line in lines[1:] if line.startswith("what():")]
    errors = [line for line in lines[1:] if re.search(r"error", line, re.IGNORECASE)]
    told = ": ".join([lines[0], *(uncaught or errors)[-1:]])
    place = innermost_frame(text)
    return f"{told}, in {place}" if place else told


def _is_foreign(file: str) -> bool:
    packages = next((part for part in _PACKAGES if f"/{part}/" in file), "")
    standard = file.startswith(("<", sysconfig.get_path("stdlib"))) and not packages
    return standard or file.startswith(f"{Path(__file__).parent}/") or f"/{packages}/torch/" in file
