"""A deadline for all retries on a thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator

_thread = threading.local()  # the deadline of each thread's current call


@contextlib.contextmanager
def within(seconds: float) -> Generator[None, None, None]:
    """Limit retries on this thread to the next ``seconds`` seconds, or to the enclosing deadline if that is earlier."""
    before = until()
    _thread.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.until = before


def until() -> float:
    """Return the deadline of retries on this thread, as a value of ``time.monotonic()``; infinity if none is set."""
    found: float = getattr(_thread, "until", math.inf)
    return found
