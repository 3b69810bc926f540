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
    """Begin no retry on this thread later than ``seconds`` from now, or later than an outer deadline."""
    before = until()
    _thread.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.until = before


def until() -> float:
    """Return the deadline of this thread's retries on the clock ``time.monotonic``, shared by a machine's processes."""
    found: float = getattr(_thread, "until", math.inf)
    return found
