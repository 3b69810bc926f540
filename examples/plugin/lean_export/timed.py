"""``join_hook=ddp_timed``: like ``ddp``, but logs the time that a rank without data spent in steps of other ranks."""

from __future__ import annotations

import logging
import time

from stagereg.plugin import DdpHook, DdpJoinable

__all__ = ["TimedDdpHook"]

_log = logging.getLogger(__name__)


class TimedDdpHook(DdpHook):
    """Replaces the hook ``ddp``: ``join_hook@join.joinables.model.hook=ddp_timed``.

    Args:
        joinable: the joinable of the DDP module.
        least_s: minimum total time to log. Seconds.
    """

    def __init__(self, joinable: DdpJoinable, /, least_s: float = 0.0) -> None:
        super().__init__(joinable)
        self.least_s = least_s
        self.steps = 0
        self.seconds = 0.0

    def main_hook(self) -> None:
        """Take part in one step of the other ranks."""
        began = time.perf_counter()
        super().main_hook()
        self.seconds += time.perf_counter() - began
        self.steps += 1

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish like ``ddp``, and log the total time."""
        super().post_hook(is_last_joiner)
        if self.steps and self.seconds >= self.least_s:
            _log.info("without data, this rank took part in %d steps for %.1f s", self.steps, self.seconds)
