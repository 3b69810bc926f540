"""``step``: do the local work of a training step: an optimizer, an LR schedule, an average of the weights, a counter.

What has no collectives of its own still has to happen on ranks without data, or replicas drift apart: moments and step
counts of the optimizer, the learning rate, whatever is saved in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

from stagereg.join.joinable import JoinHook
from stagereg.registry import register

__all__ = ["StepHook"]


@register("join_hook", "step")
class StepHook(JoinHook):
    """Calls a function once per step of the active ranks.

    Args:
        step: the function.
        due: tells whether the active ranks do so now; always, if it is not given.
    """

    def __init__(self, step: Callable[[], object], due: Callable[[], bool] | None = None) -> None:
        self._step = step
        self._due = due

    def main_hook(self) -> None:
        """Call the function."""
        if self._due is None or self._due():
            self._step()
