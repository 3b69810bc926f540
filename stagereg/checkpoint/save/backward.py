"""The moment for work in the background: while the training thread is in a backward pass, which needs no interpreter.

A forward pass is Python that starts many short operations: of a save that begins there training loses twice as much.
The backward pass is one call of autograd's engine, into C++, for whichever model, wrapper or schedule of stages. (It
shows in the thread's stack, too; but Python 3.11 may crash where a thread reads another's stack, which is
https://github.com/python/cpython/issues/99110.) It needs the interpreter's lock now and then even so, to free what the
forward pass kept, and Python hands it over every 5 ms only. So while a save is written, threads take
:func:`short_turns`; and they do not take a core from training when they wake up, as after each write to the disk
(:func:`give_way`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.autograd.variable import Variable

_LOOK_S = 0.002
_TURN_S = 0.0002
_in_backward: list[int] = []  # threads, by their ``get_ident()``, as many times as they are


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
    while _is_told() and time.monotonic() < until and thread not in _in_backward:
        if hurried.wait(_LOOK_S):
            return
    hurried.wait(_LOOK_S)  # it needs the interpreter a last time, on its way into C++


class _Telling(torch._C._ImperativeEngine):
    """The engine of autograd, which says which threads are in it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        _in_backward.append(thread)
        try:
            return super().run_backward(*args, **kwargs)
        finally:
            _in_backward.remove(thread)


def _is_told() -> bool:
    """Have the engine say so from now on; whether it does, since a library may have put its own in that place."""
    if type(Variable._execution_engine) is torch._C._ImperativeEngine:
        Variable._execution_engine = _Telling()
    return isinstance(Variable._execution_engine, _Telling)
