"""Determines the memory that only an optimizer writes, and calls back before each write.

A :class:`WriteGuard` calls back before any torch optimizer steps, before any module loads a state dict, before a replay
of a CUDA graph that may contain an optimizer step (torch 2.14 and newer), and in :func:`announce_write`. It uses a
global pre-hook of optimizer steps, which is called for all implementations (default, foreach, fused), for
``ZeroRedundancyOptimizer`` and for its inner optimizer. It tracks the optimizers that have stepped since its creation,
or that were passed to it. Their parameters that require gradients, and their state, are the memory that no other code
should write between two steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stagereg.base.capture import is_capturing
from stagereg.base.hooks import ANNOUNCES_REPLAYS, BEFORE_STEPS, LOADS, REPLAYS
from stagereg.kernel.state_dict import flatten


class WriteGuard:
    """Calls ``before_write`` before a predictable write, on the writing thread, until closed or garbage-collected.

    ``before_write``: a bound method, held by a weak reference; must not raise.
    """

    def __init__(self, before_write: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._addresses: list[int] = []  # addresses of the tensors in ``_owned``
        self._owned: dict[tuple[int, int], int] = {}
        self._before_write = weakref.WeakMethod(before_write)
        self._removes = [BEFORE_STEPS.add(self._before_step), LOADS.add(self._before_load)]
        self._removes.append(REPLAYS.add(self._before_replay))

    def _before_step(self, optimizer: Optimizer) -> None:
        if is_capturing():
            self._captured.add(optimizer)  # a capture writes nothing, but its replays do
        else:
            self._optimizers.add(optimizer)
        self._before_load(None)

    def _before_load(self, _: object) -> None:
        if (before_write := self._before_write()) is not None:
            before_write()

    def _before_replay(self, _: object) -> None:
        if any(self._may_replay(optimizer) for optimizer in [*self._captured, *self._optimizers]):
            self._before_load(None)  # otherwise the graph has no optimizer step, only a forward or backward pass

    def watch(self, optimizer: Optimizer) -> None:
        """Register an optimizer that has not stepped yet and is in no CUDA graph."""
        self._optimizers.add(optimizer)
        self._watched.add(optimizer)

    def owned(self, is_known: Callable[[Optimizer], bool]) -> dict[tuple[int, int], int]:
        """Return the tensors that only an optimizer writes, as a mapping of (device index, address) to bytes.

        Includes the optimizers that were passed to :meth:`watch`, and optimizers that have stepped and for which
        ``is_known`` returns True. Returns the same object while the addresses do not change.

        Before torch 2.14, excludes optimizers that a CUDA graph has captured, or may have captured before this guard
        was created: replays write without a callback.
        """
        announced = [
            optimizer
            for optimizer in list(self._optimizers)
            if (optimizer in self._watched or is_known(optimizer))
            and (ANNOUNCES_REPLAYS or not self._may_replay(optimizer))
        ]
        found = [x for optimizer in announced for x in written_by(optimizer)]
        addresses = [*map(torch.Tensor.data_ptr, found)]
        if addresses != self._addresses:
            places = zip(map(torch.Tensor.get_device, found), addresses, strict=True)
            self._addresses, self._owned = addresses, dict(zip(places, [x.nbytes for x in found], strict=True))
        return self._owned

    def _may_replay(self, optimizer: Optimizer) -> bool:
        """Return whether replays of a CUDA graph may write the optimizer's tensors."""
        may_be_captured = any(group.get("capturable") for group in optimizer.param_groups)
        return optimizer in self._captured or (may_be_captured and optimizer not in self._watched)

    def close(self) -> None:
        """Stop calling back. Idempotent."""
        for remove in self._removes:
            remove()


def written_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the plain tensors that an optimizer writes: parameters that require gradients, and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found: list[Any] = list(parameters)
    for p in parameters:
        found += [x for x in optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
    if {*map(type, found)} <= {torch.Tensor, torch.nn.Parameter}:
        return found
    return flatten(found).tensors  # flatten lists the inner tensors of DTensors


def announce_write() -> None:
    """Call the callbacks of all guards. Call this before code other than an optimizer writes parameters."""
    LOADS.call(None)
