"""Runs a function in a child of this process; for programs that have imported torch and not run any thread of it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(act: Callable[..., object], *args: object) -> int:
    """Call it, and return the status that the child ended with; what it raised is printed."""
    pid = os.fork()
    if pid == 0:
        try:
            act(*args)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]
