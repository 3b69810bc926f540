"""The contract of the hook, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

from typing import Any

import stagereg
from stagereg.testing import JoinHookContract

from lean_export.timed import TimedDdpHook
from lean_export.training import Training

__all__ = ["TimedDdpContract"]


class TimedDdpContract(JoinHookContract):
    """Tests ``join_hook=ddp_timed`` instead of the ``ddp`` joinable's own hook."""

    def build(self) -> Training:
        """Return a training run on this rank."""
        return Training()

    def joinables(self, subject: Training) -> list[Any]:
        """Return the joinables of the model, with this hook, and of the optimizer."""
        ddp = stagereg.build("joinable", "ddp", module=subject.model, hook=TimedDdpHook)
        return [ddp, stagereg.build("joinable", "step", step=subject.optimizer.step, after=ddp)]

    def step(self, subject: Training, value: float) -> None:
        """Take one step on a rank with data; ``value`` determines its batch."""
        subject.step([value])

    def state(self, subject: Training) -> dict[str, Any]:
        """Return the values that must be equal to ``expected`` on every rank after the join."""
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return the state of one process that trains on the batches of all ranks in each step."""
        alone = Training(world_size)
        for values in steps:
            alone.step(values)
        return alone.state()
