"""The rule of waiting for lent memory: as long as somebody can be seen who will let go of it, and no longer.

So nobody waits for a caller that simply keeps what it was given, which may be the waiting thread itself, and for nobody
longer than it was told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stagereg.kernel.writers import alone

__all__ = ["GRACE_S", "OVERDRAWN", "wait_while"]

GRACE_S = 1.0
"""Seconds after which a writer that is seen no more, or not yet, is taken for gone."""

OVERDRAWN = (
    "stagereg: %d staged copies are still held and no writer is letting go, so fresh memory is taken; "
    "drop copies that are no longer needed, or raise max_in_flight"
)
"""What is logged, once, when the wait was in vain."""

_POLL_S = 0.02


def wait_while(
    at_work: Callable[[], bool], returned: Callable[[float], bool], wait_s: float, patient: bool = True
) -> bool:
    """Wait for memory to come back.

    Args:
        at_work: whether somebody is seen who will let go of some.
        returned: waits for so many seconds at most; whether enough has come back.
        wait_s: seconds to wait in all at most.
        patient: give a writer that is not seen yet some time to turn up, unless this is the only thread.

    Returns:
        Whether enough has come back.
    """
    start = seen = time.monotonic()
    patience = GRACE_S if patient and not alone() else 0.0
    while not returned(0.0):
        now = time.monotonic()
        if now - start >= wait_s:
            return False
        if at_work():
            seen, patience = now, GRACE_S  # once it is seen no more, it may be about to let go
        elif now - seen >= patience:
            return False
        if returned(_POLL_S):
            return True
    return True
