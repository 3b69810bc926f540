"""Makes the thread that writes a save yield the CPU and the GIL to the training thread.

A backward pass sometimes needs the GIL, to free Python tensors, but Python switches threads only every 5 ms.
:func:`short_turns` shortens this interval while a save is written. After :func:`give_way`, the writing thread does not
preempt the training thread when it wakes up, for example after each write to the disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

_TURN_S = 0.0002  # seconds after which Python switches threads


def give_way() -> None:
    """Prevent this thread, and threads that it starts later, from preempting others. Has an effect only on Linux."""
    with suppress(OSError, AttributeError):  # only Linux has the call
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def short_turns() -> Generator[None, None, None]:
    """Make Python switch threads after 0.2 ms instead of 5 ms, unless the program has set a shorter interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    short = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == short:  # unless other code has changed the interval
            sys.setswitchinterval(before)
