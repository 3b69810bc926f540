"""What only an optimizer writes, and the moment before it does.

A :class:`WriteGuard` calls back before any torch optimizer steps (a global step pre-hook, which is called for default,
foreach and fused implementations, for ``ZeroRedundancyOptimizer`` and the optimizer inside it), before any module loads
a state dict, and where :func:`announce_write` is called. It knows the optimizers that have stepped since it was made,
or that it was shown, and so the memory that nothing else is meant to write between two steps: their parameters that
require gradients, and their state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stagereg.base.hooks import BEFORE_STEPS, LOADS
from stagereg.kernel.state_dict import flatten


class WriteGuard:
    """Calls ``before_write`` before a write that it can foresee, on the thread that is about to write.

    It does so until it is closed or gone.

    Args:
        before_write: a bound method, which is held weakly; must not raise.
    """

    def __init__(self, before_write: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._addresses: list[int] = []  # of the tensors that were looked at last
        self._owned: dict[tuple[int, int], int] = {}
        self._before_write = weakref.WeakMethod(before_write)
        self._removes = BEFORE_STEPS.add(self._before_step), LOADS.add(self._before_load)

    def _before_step(self, optimizer: Optimizer) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured.add(optimizer)  # nothing is written now, and later by each replay, without a call
        else:
            self._optimizers.add(optimizer)
            self._before_load(None)

    def _before_load(self, _: object) -> None:
        if (before_write := self._before_write()) is not None:
            before_write()

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that has not stepped yet, and whose step no CUDA graph has."""
        self._optimizers.add(optimizer)
        self._watched.add(optimizer)

    def owned(self, is_known: Callable[[Optimizer], bool]) -> dict[tuple[int, int], int]:
        """Return device index and address -> bytes of each tensor that only an optimizer writes.

        It counts the optimizers that :meth:`watch` was given, and those that have stepped and ``is_known`` accepts. It
        is the same object as long as their addresses are the same ones.

        It does not count an optimizer that a CUDA graph has captured, or may have captured before this was made: that
        optimizer may write without calling back.
        """
        announced = [
            optimizer
            for optimizer in list(self._optimizers)
            if optimizer not in self._captured
            and (
                optimizer in self._watched
                or (is_known(optimizer) and not any(group.get("capturable") for group in optimizer.param_groups))
            )
        ]
        found = [x for optimizer in announced for x in written_by(optimizer)]
        addresses = [*map(torch.Tensor.data_ptr, found)]
        if addresses != self._addresses:
            places = zip(map(torch.Tensor.get_device, found), addresses, strict=True)
            self._addresses, self._owned = addresses, dict(zip(places, [x.nbytes for x in found], strict=True))
        return self._owned

    def close(self) -> None:
        """Call back no more. Twice is harmless."""
        for remove in self._removes:
            remove()


def written_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the plain tensors that an optimizer writes: its parameters that require gradients, and its state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found: list[Any] = list(parameters)
    for p in parameters:
        found += [x for x in optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
    if {*map(type, found)} <= {torch.Tensor, torch.nn.Parameter}:
        return found
    return flatten(found).tensors  # DTensors come apart into the tensors inside


def announce_write() -> None:
    """Call all guards back: parameters are about to be written by something that is no optimizer."""
    LOADS.call(None)
