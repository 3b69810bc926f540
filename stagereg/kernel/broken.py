"""Broken process groups: detects their errors, and aborts a group so that no thread waits in it forever."""

from __future__ import annotations

import contextlib
import re
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stagereg.kernel.channel import resources_of

_TAG = 0x57A6E  # tag of a receive that is never sent; no program uses this tag
_TIMEOUT = r"Timed out waiting \d+ ?ms|pair closure|operation timeout|Operation timed out!|wait timeout|Socket Timeout"
_LOST = r"Connection (closed|reset)|Broken pipe"
_BROKEN = rf"\bDist\w*Error:|gloo|nccl|c10d|{_TIMEOUT}"


def collectives_of(group: dist.ProcessGroup | None) -> int:
    """Return how many collectives the group has run on this rank; 0 if the group does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return 0


def abort(group: dist.ProcessGroup) -> None:
    """Make every pending operation on ``group`` fail immediately on this rank. Afterwards the group is unusable.

    Gloo's ``abort`` and ``shutdown`` do not wake a thread that waits in a collective, but a receive that times out
    does: gloo then closes all connections of this rank's group, so every operation that waits on one of them, on this
    rank or at the other end, fails immediately. In a ring not all pairs of ranks are connected, so each rank must call
    this function. Other backends get ``group.abort()``. Never raises. Thread-safe.
    """
    resources = resources_of(group)
    resources.aborted = True
    for backend in [*backends_of(group), *resources.backends()]:
        _abort(backend)


def discard_channels(group: dist.ProcessGroup) -> None:
    """Close the joins' resources of ``group`` after a failed join, in which exchanges may be incomplete."""
    resources = resources_of(group)
    for backend in resources.backends():
        _abort(backend)  # a thread may wait for a rank that never arrives
    resources.close()


def _abort(backend: Any) -> None:
    if isinstance(backend, dist.ProcessGroupGloo):
        _close_connections(backend)
    else:
        with contextlib.suppress(Exception):
            backend.abort()


def _close_connections(backend: Any) -> None:
    """Time out a receive from the first rank that is still connected."""
    for distance in range(1, backend.size()):
        # A receive from a rank that has already aborted fails immediately, and leaves the other connections open.
        try:
            source = (backend.rank() + distance) % backend.size()
            backend.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], source, _TAG).wait(
                timedelta(milliseconds=5)
            )
        except Exception as error:
            if is_timeout(error):
                return


def is_broken_operation(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, looks like a failed collective or store call."""
    return _matches(_BROKEN, error)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, looks like a connection whose other process is gone."""
    return _matches(_LOST, error)


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, looks like a timeout waiting for another rank."""
    return _matches(_TIMEOUT, error)


def _matches(pattern: str, error: BaseException) -> bool:
    # Gloo raises a plain RuntimeError, like many others; only the text distinguishes it.
    return re.search(pattern, "".join(traceback.format_exception(error, limit=0)), re.IGNORECASE) is not None


def backends_of(group: Any) -> list[Any]:
    """Return the distinct backends of a group, without the wrappers of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    found: dict[int, Any] = {}
    for device in group._device_types:
        with contextlib.suppress(Exception):
            backend: Any = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)
            found[id(backend)] = backend
    return list(found.values())
