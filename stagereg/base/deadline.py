"""A deadline for all retries of a thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator

_thread = threading.local()  # the deadline of each thread's current call


@contextlib.contextmanager
def within(seconds: float) -> Generator[None, None, None]:
    """Start no retry on this thread after ``seconds`` from now, or after an outer deadline."""
    before = until()
    _thread.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.until = before


def until() -> float:
    """Return the deadline of this thread's retries, in the seconds of ``time.monotonic()`` of this machine."""
    found: float = getattr(_thread, "until", math.inf)
    return found
