"""Broken process groups: recognises the errors of one, and breaks one on purpose, so that none waits in it for ever."""

from __future__ import annotations

import contextlib
import re
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stagereg.kernel.channel import resources_of

_TAG = 0x57A6E  # of a receive that no rank sends for; a tag that no program uses
_TIMEOUT = r"Timed out waiting \d+ ?ms|pair closure|operation timeout|Operation timed out!|wait timeout|Socket Timeout"
_LOST = r"Connection (closed|reset)|Broken pipe"
_BROKEN = rf"\bDist\w*Error:|gloo|nccl|c10d|{_TIMEOUT}"


def collectives_of(group: dist.ProcessGroup | None) -> int:
    """Return how many collectives the group has run on this rank; 0 where it does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return 0


def abort(group: dist.ProcessGroup) -> None:
    """Let every operation on ``group`` that is under way fail, on this rank at once; the group is unusable afterwards.

    Gloo's own ``abort`` and ``shutdown`` do nothing, and neither wakes a thread that waits in a collective. A receive
    that times out does: gloo then takes every connection of this rank's group for broken and closes it, so whatever
    waits on one, on this rank or at its other end, fails at once. In a ring not every two ranks are connected, so each
    rank has to call it. Never raises; for any thread. Other backends get ``group.abort()``.
    """
    resources = resources_of(group)
    resources.aborted = True
    for backend in [*backends_of(group), *resources.backends()]:
        _abort(backend)


def discard_channels(group: dist.ProcessGroup) -> None:
    """Let go of what joins keep for ``group``, after one has failed: its ranks may be anywhere in their exchanges."""
    resources = resources_of(group)
    for backend in resources.backends():
        _abort(backend)  # or a thread would wait in one for a rank that does not come
    resources.close()


def _abort(backend: Any) -> None:
    if isinstance(backend, dist.ProcessGroupGloo):
        _close_connections(backend)
    else:
        with contextlib.suppress(Exception):
            backend.abort()


def _close_connections(backend: Any) -> None:
    """Let a receive time out, from the first rank that is still connected."""
    for distance in range(1, backend.size()):
        # A receive from a rank that has aborted earlier fails at once, and leaves the other connections open.
        try:
            source = (backend.rank() + distance) % backend.size()
            backend.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], source, _TAG).wait(
                timedelta(milliseconds=5)
            )
        except Exception as error:
            if is_timeout(error):
                return


def is_broken_operation(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if a collective or a call of the store has ended with it."""
    return _matches(_BROKEN, error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if the process at the other end of a connection is gone."""
    return _matches(_LOST, error)


def is_timeout(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if an operation has waited too long for another rank."""
    return _matches(_TIMEOUT, error)


def _matches(pattern: str, error: BaseException) -> bool:
    # Gloo raises a plain RuntimeError, as so much else does; only its text tells them apart.
    return re.search(pattern, "".join(traceback.format_exception(error, limit=0)), re.IGNORECASE) is not None


def backends_of(group: Any) -> list[Any]:
    """The backends of a group, each once, without what ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps around them."""
    found: dict[int, Any] = {}
    for device in group._device_types:
        with contextlib.suppress(Exception):
            backend: Any = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)
            found[id(backend)] = backend
    return list(found.values())
