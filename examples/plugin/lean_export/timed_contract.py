"""How the hook is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

from typing import Any

import stagereg
from stagereg.testing import JoinHookContract

from lean_export.timed import TimedDdpHook
from lean_export.training import Training

__all__ = ["TimedDdpContract"]


class TimedDdpContract(JoinHookContract):
    """``join_hook=ddp_timed`` in the place of the ``ddp`` joinable's own hook."""

    def build(self) -> Training:
        """Return a training run on this rank."""
        return Training()

    def joinables(self, subject: Training) -> list[Any]:
        """Return what goes into the join: the model with this hook, and the optimizer."""
        ddp = stagereg.build("joinable", "ddp", module=subject.model, hook=TimedDdpHook)
        return [ddp, stagereg.build("joinable", "step", step=subject.optimizer.step, after=ddp)]

    def step(self, subject: Training, value: float) -> None:
        """Take one step on a rank that has data; ``value`` stands for its batch."""
        subject.step([value])

    def state(self, subject: Training) -> dict[str, Any]:
        """Return what must be right on every rank after the join."""
        return subject.state()

    def expected(self, steps: list[list[float]], world_size: int) -> dict[str, Any]:
        """Return the same from one process, which takes the batches of all ranks at once."""
        alone = Training(world_size)
        for values in steps:
            alone.step(values)
        return alone.state()
