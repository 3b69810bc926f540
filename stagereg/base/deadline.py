"""A deadline for all that a thread tries again."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator

_thread = threading.local()  # the deadline of the call under way on each thread


@contextlib.contextmanager
def within(seconds: float) -> Generator[None, None, None]:
    """Bound all retries of this thread: none begins later than ``seconds`` from now, or than an outer bound."""
    before = until()
    _thread.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.until = before


def until() -> float:
    """Return when this thread's retries end, as ``time.monotonic`` counts in all processes of a machine."""
    found: float = getattr(_thread, "until", math.inf)
    return found
