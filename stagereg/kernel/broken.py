"""Detects the errors of broken process groups, and aborts a group so that no thread waits in it forever."""

from __future__ import annotations

import contextlib
import re
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stagereg.kernel.channel import resources_of

_TAG = 0x57A6E  # tag of a message that no rank ever sends
_TIMEOUT = r"Timed out waiting \d+ ?ms|pair closure|operation timeout|Operation timed out!|wait timeout|Socket Timeout"
_LOST = r"Connection (closed|reset)|Broken pipe"
_BROKEN = rf"\bDist\w*Error:|gloo|nccl|c10d|{_TIMEOUT}"


def collectives_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of collectives that the group has run on this rank, or 0 if the group does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return 0


def abort(group: dist.ProcessGroup) -> None:
    """Make every pending operation on ``group`` fail immediately on this rank. Afterwards the group is unusable.

    Gloo's ``abort`` and ``shutdown`` do not wake a thread that waits in a collective, but the timeout of a receive
    does. Gloo then closes all connections of the group on this rank, so operations that wait on these connections fail
    on both ends. Not all pairs of ranks are connected, so every rank must call this function. For other backends, calls
    their ``abort()``. Never raises. Thread-safe.
    """
    resources = resources_of(group)
    resources.aborted = True
    for backend in [*backends_of(group), *resources.backends()]:
        _abort(backend)


def discard_channels(group: dist.ProcessGroup) -> None:
    """Close the resources that joins on ``group`` share. Called after a failed join, which may not finish exchanges."""
    resources = resources_of(group)
    for backend in resources.backends():
        _abort(backend)  # wakes a thread that may wait for a failed rank
    resources.close()


def _abort(backend: Any) -> None:
    if isinstance(backend, dist.ProcessGroupGloo):
        _close_connections(backend)
    else:
        with contextlib.suppress(Exception):
            backend.abort()


def _close_connections(backend: Any) -> None:
    """Start a receive from the first rank that is still connected, and let it time out."""
    message = [torch.zeros(1, dtype=torch.uint8, device="cpu")]
    for distance in range(1, backend.size()):
        # If the other rank has aborted, the receive fails immediately and other connections stay open: try the next.
        try:
            source = (backend.rank() + distance) % backend.size()
            backend.recv(message, source, _TAG).wait(timedelta(milliseconds=5))
        except Exception as error:
            if is_timeout(error):
                return


def is_broken_operation(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, is probably a failed collective or a failed store call."""
    return _matches(_BROKEN, error)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, is probably a connection whose other process has exited."""
    return _matches(_LOST, error)


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, is probably a timeout of a wait for another rank."""
    return _matches(_TIMEOUT, error)


def _matches(pattern: str, error: BaseException) -> bool:
    # Gloo raises a plain RuntimeError, so only the message identifies its errors.
    return re.search(pattern, "".join(traceback.format_exception(error, limit=0)), re.IGNORECASE) is not None


def backends_of(group: Any) -> list[Any]:
    """Return the distinct backends of a group, without the wrappers that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` adds."""
    found: dict[int, Any] = {}
    for device in group._device_types:
        with contextlib.suppress(Exception):
            backend: Any = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)
            found[id(backend)] = backend
    return list(found.values())
