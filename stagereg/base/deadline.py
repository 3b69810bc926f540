"""A deadline for all retries on a thread, and a time limit for one call."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

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


def answer_within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return ``call()``, which another thread calls; ``None`` if it raises an exception or takes longer."""
    answer: Future[T | None] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception:
            answer.set_result(None)

    threading.Thread(target=work, name="stagereg-answer", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        return None
