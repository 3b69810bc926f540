"""Call bound methods before or after events of torch, such as optimizer steps, while the methods' owners exist.

A method runs on the thread of the event. torch raises an error if its dict of step hooks changes during a step. The
garbage collector may delete an owner at any time, even during a step, so this module never removes its two hooks from
torch. For events that have no hooks in torch, this module replaces methods of torch while owners exist.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # used by torch's optimizers too: imports the compiler only when called
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Hooks:
    """The bound methods that are called for one kind of event."""

    def __init__(self) -> None:
        self._hooks: dict[int, weakref.WeakMethod[Callable[[Any], object]]] = {}
        self._lock = threading.RLock()  # a finalizer may remove a method while this thread adds one

    def add(self, method: Callable[[Any], object]) -> Callable[[], object]:
        """Call ``method`` at events until its owner is deleted or the returned function is called. One per owner."""
        owner: Any = method.__self__  # type: ignore[attr-defined]
        with self._lock:
            if not self._hooks:
                self._begin()
            self._hooks[id(owner)] = weakref.WeakMethod(method)
        remove = weakref.finalize(owner, self._remove, id(owner))
        remove.atexit = False
        return remove

    def call(self, x: Any) -> None:
        for hook in list(self._hooks.values()):
            if (method := hook()) is not None:
                method(x)

    def _remove(self, key: int) -> None:
        with self._lock:
            if self._hooks.pop(key, None) is not None and not self._hooks:
                self._end()

    def _begin(self) -> None: ...

    def _end(self) -> None: ...


class _TorchHooks(Hooks):
    """Hooks that are called by one global hook of torch, which ``register`` adds."""

    def __init__(self, register: Callable[[Any], object]) -> None:
        super().__init__()
        self._register: Callable[[Any], object] | None = register

    def _begin(self) -> None:
        register, self._register = self._register, None
        if register is not None:
            register(_disable_dynamo(lambda x, *_: self.call(x)))


class _MethodHooks(Hooks):
    """Hooks that run before some methods of torch, with ``self`` as argument. ``methods``: pairs (class, name)."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        super().__init__()
        self._methods = methods
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # class, name, torch's method, its replacement

    def _begin(self) -> None:
        for kind, name in self._methods:
            torchs = getattr(kind, name)
            ours = self._hooked(torchs)
            self._replaced.append((kind, name, torchs, ours))
            setattr(kind, name, ours)

    def _end(self) -> None:
        for kind, name, torchs, ours in self._replaced:
            if getattr(kind, name) is ours:  # otherwise another library has replaced the method since
                setattr(kind, name, torchs)
        self._replaced.clear()

    def _hooked(self, torchs: Any) -> Any:
        def method(x: Any, *args: Any, **kwargs: Any) -> Any:
            self.call(x)
            return torchs(x, *args, **kwargs)

        # The name prevents infinite recursion: it shows pybind11 that this function calls the method that it overrides.
        method.__code__ = method.__code__.replace(co_name=torchs.__name__)
        return functools.wraps(torchs)(method)


ANNOUNCES_REPLAYS = hasattr(torch.cuda.graphs, "register_graph_replay_start_hook")
"""Whether torch calls hooks before a CUDA graph is replayed (torch 2.14 and newer)."""

# Before or after each step of any optimizer in the process; called with the optimizer.
BEFORE_STEPS = _TorchHooks(register_optimizer_step_pre_hook)
AFTER_STEPS = _TorchHooks(register_optimizer_step_post_hook)
# Before each replay of a CUDA graph. torch ignores exceptions in these hooks.
REPLAYS = _TorchHooks(getattr(torch.cuda.graphs, "register_graph_replay_start_hook", lambda hook: None))
LOADS = _MethodHooks((torch.nn.Module, "load_state_dict"))  # before a module loads a state dict
PLATEAUS = _MethodHooks((ReduceLROnPlateau, "step"))  # before a step of the scheduler
FREES = _MethodHooks(
    *((torch.UntypedStorage, name) for name in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")),
    *((torch.Tensor, name) for name in ("resize_", "resize_as_")),
)
"""Before a storage, such as a tensor's, is freed, resized or moved to shared memory in place."""

_GROUPS = [getattr(dist, name, None) for name in ("ProcessGroup", "ProcessGroupNCCL")]
ABORTS = _MethodHooks(*((kind, "abort") for kind in _GROUPS if kind))
"""Before the program aborts the collectives of a process group. torch's own threads abort without a callback."""
