"""What only an optimizer writes, and the moment before it does.

A :class:`WriteGuard` calls back before any torch optimizer steps (a global step pre-hook, which fires for default,
foreach and fused implementations, for ``ZeroRedundancyOptimizer`` and the optimizer inside it) and before any module
loads a state dict. It knows the optimizers that have stepped since it was made, or that it was shown, and so the memory
that nothing else is meant to write between two steps: their parameters that require gradients, and their state.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stagereg.kernel.state_dict import flatten

__all__ = ["WriteGuard"]

_callbacks: dict[int, Callable[[], None]] = {}
_lock = threading.Lock()


class WriteGuard:
    """Calls ``before_write`` before a write that it can foresee, on the thread that is about to write.

    Args:
        before_write: must not raise.
    """

    def __init__(self, before_write: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None
        _listen(id(self), before_write)
        seen = self._optimizers

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.add(optimizer)
            before_write()

        self._handle = register_optimizer_step_pre_hook(before_step)

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that has not stepped yet."""
        self._optimizers.add(optimizer)

    def owned(self) -> dict[tuple[int, int], int]:
        """Return device index and address -> bytes of each tensor that only a known optimizer writes."""
        found = [x for optimizer in list(self._optimizers) for x in _written_by(optimizer)]
        places = zip(map(torch.Tensor.get_device, found), map(torch.Tensor.data_ptr, found), strict=True)
        return dict(zip(places, map(attrgetter("nbytes"), found), strict=True))

    def close(self) -> None:
        """Call back no more. Twice is harmless."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        _forget(id(self))


def _written_by(optimizer: Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    found: list[Any] = list(parameters)
    for p in parameters:
        found += [x for x in optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
    if all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in found):
        return found
    return flatten(found).tensors  # DTensors come apart into the tensors inside


# torch has no hook that is called before any module loads, so the method is wrapped while a guard is there.
_load_state_dict = torch.nn.Module.load_state_dict


@functools.wraps(_load_state_dict)
def _guarded(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    for callback in list(_callbacks.values()):
        callback()
    return _load_state_dict(self, *args, **kwargs)


def _listen(key: int, callback: Callable[[], None]) -> None:
    global _load_state_dict
    with _lock:
        if not _callbacks and torch.nn.Module.load_state_dict is not _guarded:
            _load_state_dict = torch.nn.Module.load_state_dict
            torch.nn.Module.load_state_dict = _guarded  # type: ignore[method-assign]
        _callbacks[key] = callback


def _forget(key: int) -> None:
    with _lock:
        was_there = _callbacks.pop(key, None) is not None
        if was_there and not _callbacks and torch.nn.Module.load_state_dict is _guarded:
            torch.nn.Module.load_state_dict = _load_state_dict  # type: ignore[method-assign]
