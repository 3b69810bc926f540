"""How the thread that writes a save leaves the processor and the interpreter to the training thread.

A backward pass needs the interpreter's lock now and then, to free Python's tensors, and Python hands the lock over
every 5 ms only. So threads take :func:`short_turns` while a save is written. The writing thread does not take a core
from training when it wakes up, as after each write to the disk (:func:`give_way`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

_TURN_S = 0.0002


def give_way() -> None:
    """Have this thread, and those that it starts, not interrupt threads that compute; where the system allows it."""
    with suppress(OSError, AttributeError):  # Linux has it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def short_turns() -> Generator[None, None, None]:
    """Have a thread that waits for the interpreter get it after 0.2 ms, unless the program wants that sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    short = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == short:  # and nobody has set it meanwhile
            sys.setswitchinterval(before)
