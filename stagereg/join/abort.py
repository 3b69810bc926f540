"""Ending what a process group is busy with, and how long it may be busy: nobody waits out a group's 30 minutes.

Gloo's own ``abort`` and ``shutdown`` do nothing, and neither wakes who waits in a collective. What does: a receive that
times out. Gloo then holds every connection of this rank's group for broken and closes it, so whatever waits on one, on
this rank or at its other end, fails at once.

Errors of such operations are recognized here too. All of it may be called from any thread; whom to tell, and why, is
left to others.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["abort", "is_broken_operation", "is_timeout", "limit_of", "limit_operations", "was_aborted"]

_TAG = 0x57A6E
"""Of the receive that nobody sends for; a tag that no program uses."""
_AT_ONCE = timedelta(milliseconds=5)
_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_TORCHS_LIMIT_S = 1800.0
_TIMEOUT = r"Timed out waiting \d+ ?ms|pair closure|operation timeout|Operation timed out!|wait timeout|Socket Timeout"
_BROKEN = rf"gloo|nccl|c10d|{_TIMEOUT}"


def abort(group: dist.ProcessGroup) -> None:
    """Let every operation on ``group`` that is under way fail, on this rank at once; the group is unusable afterwards.

    Ranks that are connected to this one fail too, but in a ring not every two are: each rank has to call it.
    Never raises. Backends other than gloo are told by ``group.abort()``, which was not tried on an accelerator.
    """
    _aborted.add(group)
    others = False
    for backend in _backends(group):
        if _is_gloo(backend):
            _close_connections(backend, group.rank(), group.size())
        else:
            others = True
    if others:
        with contextlib.suppress(Exception):
            group.abort()


def _close_connections(backend: Any, rank: int, size: int) -> None:
    """Let a receive time out, of the first rank that is still connected.

    One over a connection that the other end has closed, as ranks do that abort a moment earlier, fails without touching
    the rest: whoever waits for a rank that aborts nothing, since it is the one that failed, would go on waiting.
    """
    for distance in range(1, size):
        try:
            backend.recv([torch.zeros(1)], (rank + distance) % size, _TAG).wait(_AT_ONCE)
        except Exception as error:
            if is_timeout(error):
                return


def was_aborted(group: dist.ProcessGroup) -> bool:
    """Whether :func:`abort` has ended this group on this rank."""
    return group in _aborted


def limit_operations(group: dist.ProcessGroup, timeout_s: float) -> Callable[[], None]:
    """Let operations on ``group`` that begin from now on fail after ``timeout_s`` seconds.

    Returns:
        What puts the former limit back; it never raises. A backend whose limit cannot be read is left alone.
    """
    former: list[tuple[Any, timedelta]] = []
    for backend in _backends(group):
        with contextlib.suppress(Exception):
            limit = backend.options._timeout
            backend._set_default_timeout(timedelta(seconds=timeout_s))
            former.append((backend, limit))

    def restore() -> None:
        for backend, limit in former:
            with contextlib.suppress(Exception):
                backend._set_default_timeout(limit)

    return restore


def limit_of(group: dist.ProcessGroup) -> float:
    """How long an operation on ``group`` may take, in seconds; half an hour where its backends do not tell."""
    limits = []
    for backend in _backends(group):
        with contextlib.suppress(Exception):
            limits.append(backend.options._timeout.total_seconds())
    return min(limits, default=_TORCHS_LIMIT_S)


def is_broken_operation(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if a collective or a call of the store has ended with it.

    Gloo raises a plain ``RuntimeError``, as so much else does; its text is all that tells them apart.
    """
    return any(isinstance(each, dist.DistError) or _says(_BROKEN, each) for each in _chain(error))


def is_timeout(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if an operation has waited too long for another rank."""
    return any(_says(_TIMEOUT, each) for each in _chain(error))


def _says(pattern: str, error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and re.search(pattern, str(error), re.IGNORECASE) is not None


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, each once, without what ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps around them."""
    found: dict[int, Any] = {}
    with contextlib.suppress(Exception):
        for device in group._device_types:
            with contextlib.suppress(Exception):
                backend: Any = group._get_backend(device)
                backend = getattr(backend, "wrapped_pg", backend)
                found[id(backend)] = backend
    return list(found.values())


def _is_gloo(backend: Any) -> bool:
    kind = getattr(dist, "ProcessGroupGloo", None)
    return kind is not None and isinstance(backend, kind)
