"""Functions that are called before methods of torch for which torch has no hooks.

While there are such functions, functions of this module replace the methods.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch


class MethodHooks:
    """Calls functions before some methods of torch, on the thread that calls the method.

    Args:
        methods: pairs of a class and the name of a method.
    """

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self._methods = methods
        self._hooks: dict[int, Callable[[Any], object]] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # class, name, torch's method, the method in its place
        self._lock = threading.RLock()  # a finalizer may remove a function while this thread adds one

    def add(self, owner: object, hook: Callable[[Any], object]) -> Callable[[], object]:
        """Call ``hook`` with each object whose method is called, until ``owner`` is gone or the result is called."""
        with self._lock:
            if not self._hooks:
                for kind, name in self._methods:
                    torchs = getattr(kind, name)
                    ours = self._hooked(torchs)
                    self._replaced.append((kind, name, torchs, ours))
                    setattr(kind, name, ours)
            self._hooks[id(owner)] = hook
        remove = weakref.finalize(owner, self._remove, id(owner))
        remove.atexit = False
        return remove

    def call(self, x: Any) -> None:
        """Call all functions, as before a method of ``x``."""
        for hook in list(self._hooks.values()):
            hook(x)

    def _remove(self, key: int) -> None:
        with self._lock:
            self._hooks.pop(key, None)
            if not self._hooks:
                for kind, name, torchs, ours in self._replaced:
                    if getattr(kind, name) is ours:  # and no other library has replaced it meanwhile
                        setattr(kind, name, torchs)
                self._replaced.clear()

    def _hooked(self, torchs: Any) -> Any:
        @functools.wraps(torchs)
        def method(x: Any, *args: Any, **kwargs: Any) -> Any:
            self.call(x)
            return torchs(x, *args, **kwargs)

        return method


LOADS = MethodHooks((torch.nn.Module, "load_state_dict"))  # before a module loads a state dict

FREES = MethodHooks(
    (torch.UntypedStorage, "resize_"),
    (torch.UntypedStorage, "_share_fd_cpu_"),
    (torch.UntypedStorage, "_share_filename_cpu_"),
    (torch.Tensor, "resize_"),
    (torch.Tensor, "resize_as_"),
)
"""Before a storage, which may be that of a tensor, is freed, resized or moved to shared memory in place."""
