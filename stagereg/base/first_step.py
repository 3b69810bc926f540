"""Detect the first step of this process. A process that exits before its first step loses no training.

A step of any torch optimizer counts, as does a step that is passed to a checkpointer. Optimizer steps are detected with
hooks, which can be added only after torch is imported. Python has no callback for the end of an import. So until torch
is imported, an import finder, which never finds a module, checks at each import whether torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class _FirstStep:
    """Calls functions at the first step. The method ``find_spec`` makes this object an import finder."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self._unhook: Callable[[], object] = lambda: None

    def await_step(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.find_spec()

    def take(self, _: object = None) -> None:
        calls, self.calls = self.calls, []
        if calls:
            self._unhook()
        for call in calls:
            call()

    def forget(self) -> None:
        self.calls = []  # the hooks remain, because the parent may have held their locks during the fork

    def find_spec(self, *_: object) -> None:
        torch = sys.modules.get("torch")
        if self.calls and (torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False)):
            return
        # Assign a new list, because the current import iterates over the old list. This must precede the import below.
        sys.meta_path = [each for each in sys.meta_path if each is not self]
        if self.calls:
            from stagereg.base.hooks import AFTER_STEPS

            self._unhook = AFTER_STEPS.add(self.take)


# Global because optimizers and checkpointers take steps without a reference to a launcher.
_first = _FirstStep()
os.register_at_fork(after_in_child=_first.forget)


def call_at_first_step(call: Callable[[], object]) -> None:
    """Call ``call()`` at the first step that this process takes from now on, on the thread of the step."""
    _first.calls.append(call)
    if len(_first.calls) == 1:
        _first.await_step()


def take_step() -> None:
    """Record that this process takes a step, or end the wait for its first step. Idempotent."""
    _first.take()


def is_awaited() -> bool:
    """Return whether this process still waits for its first step."""
    return bool(_first.calls)
