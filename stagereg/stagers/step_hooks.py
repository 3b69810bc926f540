"""Functions that are called before and after each step of any optimizer of the process.

A step of torch iterates over its dicts of hooks and raises if a dict changes meanwhile. A hook that ends with its owner
changes the dict whenever the garbage collector runs, also within a step. So torch gets one pair of hooks and keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo  # as torch's optimizers use it: it imports the compiler when it is called
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

StepHook = Callable[[Optimizer], object]


class _StepHooks:
    """The functions of one side of a step, called on the thread that steps."""

    def __init__(self, register: Callable[[Any], object]) -> None:
        self._hooks: dict[int, StepHook] = {}
        self._register = register
        self._registered = False

    def add(self, owner: object, hook: StepHook) -> Callable[[], object]:
        """Call ``hook`` with each optimizer until ``owner`` is gone or the result is called. One for an owner."""
        if not self._registered:
            self._registered = True

            @_disable_dynamo
            def call(optimizer: Optimizer, *_: Any) -> None:
                for each in tuple(self._hooks.values()):
                    each(optimizer)

            self._register(call)
        self._hooks[id(owner)] = hook
        remove = weakref.finalize(owner, self._hooks.pop, id(owner), None)
        remove.atexit = False
        return remove


BEFORE_STEPS = _StepHooks(register_optimizer_step_pre_hook)
AFTER_STEPS = _StepHooks(register_optimizer_step_post_hook)
