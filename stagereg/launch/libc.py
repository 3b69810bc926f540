"""What the C library is told, in the environment of processes that stage checkpoints.

glibc's ``memmove`` writes past the cache (non-temporal stores) only above a threshold that it derives from the size of
the shared cache: 99 MiB on a machine where that is 258 MiB. A staged copy is not read again soon, so a tensor of a few
MiB gains too: nearly half of the time, on two threads. The threshold can only be set before a process starts.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

__all__ = ["TUNABLES", "tunables"]

TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_BYTES = 2**20


def tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to ``environment``; none where they would do nothing, or the user has chosen."""
    before = environment.get(TUNABLES, "")
    if sys.platform != "linux" or platform.machine() != "x86_64" or _THRESHOLD in before:
        return {}
    return {TUNABLES: ":".join(filter(None, (before, f"{_THRESHOLD}={_BYTES:#x}")))}
