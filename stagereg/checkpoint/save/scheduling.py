"""How the thread that writes a save yields the processor and the interpreter to the training thread.

A backward pass needs the interpreter lock now and then, to free Python tensors, and Python switches threads only every
5 ms. So threads take :func:`short_turns` while a save is written. The writing thread does not take a core from training
when it wakes up, for example after each write to the disk (:func:`give_way`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

_TURN_S = 0.0002


def give_way() -> None:
    """Set this thread, and the threads that it starts, not to interrupt threads that compute, if the system can."""
    with suppress(OSError, AttributeError):  # only Linux has the call
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def short_turns() -> Generator[None, None, None]:
    """Give the interpreter to a waiting thread after 0.2 ms, unless the program has set a shorter interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    short = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == short:  # no other code has changed the interval meanwhile
            sys.setswitchinterval(before)
