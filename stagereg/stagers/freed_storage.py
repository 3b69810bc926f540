"""Waits for copies before the program frees, resizes or moves a storage in place that they still read.

torch has no hook for that. So while there is a :class:`StorageGuard`, functions of this module replace the methods that
do it: ``UntypedStorage.resize_``, ``Tensor.resize_`` and ``resize_as_``, and the two that move a storage to shared
memory (``Tensor.share_memory_``, and sending a tensor to another process). Each first calls the guards, then torch.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

_METHODS: tuple[tuple[Any, str], ...] = (
    (torch.UntypedStorage, "resize_"),
    (torch.UntypedStorage, "_share_fd_cpu_"),
    (torch.UntypedStorage, "_share_filename_cpu_"),
    (torch.Tensor, "resize_"),
    (torch.Tensor, "resize_as_"),
)
_guards: dict[int, Callable[[torch.UntypedStorage], None]] = {}
_replaced: list[tuple[Any, str, Any, Any]] = []  # class, name, torch's method, the method in its place
_lock = threading.RLock()  # a finalizer may remove a guard while this thread adds one


class StorageGuard:
    """Calls ``before_free`` with a storage that is about to change its address or size, on the thread that does it.

    It does so until it is closed or gone.

    Args:
        before_free: a bound method, which is held weakly; must not raise.
    """

    def __init__(self, before_free: Callable[[torch.UntypedStorage], None]) -> None:
        reference = weakref.WeakMethod(before_free)

        def call(storage: torch.UntypedStorage) -> None:
            method = reference()
            if method is not None:
                method(storage)

        _add(id(self), call)
        self._remove = weakref.finalize(self, _remove, id(self))
        self._remove.atexit = False

    def close(self) -> None:
        """Call back no more. Idempotent."""
        self._remove()


def _add(key: int, guard: Callable[[torch.UntypedStorage], None]) -> None:
    with _lock:
        if not _guards:
            for owner, name in _METHODS:
                torchs = getattr(owner, name)
                ours = _guarded(torchs)
                _replaced.append((owner, name, torchs, ours))
                setattr(owner, name, ours)
        _guards[key] = guard


def _remove(key: int) -> None:
    with _lock:
        _guards.pop(key, None)
        if not _guards:
            for owner, name, torchs, ours in _replaced:
                if getattr(owner, name) is ours:  # and no other library has replaced it meanwhile
                    setattr(owner, name, torchs)
            _replaced.clear()


def _guarded(torchs: Any) -> Any:
    @functools.wraps(torchs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _guards and (storage := _storage_of(self)) is not None:
            for guard in list(_guards.values()):
                guard(storage)
        return torchs(self, *args, **kwargs)

    return method


def _storage_of(x: Any) -> torch.UntypedStorage | None:
    if isinstance(x, torch.UntypedStorage):
        return x
    try:
        found: torch.UntypedStorage = x.untyped_storage()
    except (RuntimeError, NotImplementedError, ValueError):  # a tensor without one, such as a sparse one
        return None
    return found
