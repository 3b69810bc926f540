"""The moment for work in the background: while the training thread is in a backward pass, which needs no interpreter.

A forward pass is Python that starts many short operations: of a save that begins there training loses twice as much.
The backward pass is one call into C++, which shows in the thread's stack, for whichever model, wrapper or schedule of
stages. It needs the interpreter's lock now and then even so, to free what the forward pass kept, and Python hands it
over every 5 ms only. So while a save is written, threads take :func:`short_turns`; and they do not take a core from
training when they wake up, as after each write to the disk (:func:`give_way`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType

import torch

_LOOK_S = 0.002
_TURN_S = 0.0002
_DEEPEST = 64  # frames above the call: hooks of tensors and modules
# Where all ways into autograd meet; another torch may not have it.
_BACKWARD: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


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


def wait_for_backward(thread: int, hurried: threading.Event, limit_s: float) -> None:
    """Return when a thread, by its ``get_ident()``, is in a backward pass, or else when the event is set.

    At the latest after ``limit_s`` seconds, for programs that have no backward pass, or none for a while.
    """
    until = time.monotonic() + limit_s
    while _BACKWARD is not None and time.monotonic() < until and not _is_in_backward(thread):
        if hurried.wait(_LOOK_S):
            return
    hurried.wait(_LOOK_S)  # it needs the interpreter a last time, on its way into C++


def _is_in_backward(thread: int) -> bool:
    frame: FrameType | None = sys._current_frames().get(thread)
    for _ in range(_DEEPEST):
        if frame is None or frame.f_code is _BACKWARD:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _BACKWARD
