"""Which start of the ranks this is, where ``torchrun --max-restarts`` starts them over and over on one store.

Keys that ranks leave for each other must not be those of ranks that have died. Elastic's own count will not do: an
agent that only follows another one's restart does not count it. So each process draws a number, and rank 0's is the
name. It answers every number drawn until all ranks have heard; an answer to a process of an earlier attempt is read by
nobody.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from stagereg.errors import LaunchError

__all__ = ["await_key", "named"]

_GATHER = timedelta(minutes=10)
"""How long the ranks of a run may start one after another."""


def named(runs: Any, rank: int, world_size: int) -> str:
    """The name of this start of all ranks, the same on all of them and of no earlier one on this store.

    Args:
        runs: the store, with nothing of an attempt before its keys.
        rank: this process.
        world_size: how many call this.

    Raises:
        LaunchError: not all of them did so in time.
    """
    mine = runs.add("drawn", 1)
    if rank > 0:
        await_key(runs, f"answer/{mine}", "rank 0 did not start")
        name: str = runs.get(f"answer/{mine}").decode()
        runs.add(f"heard/{name}", 1)
        return name
    answered, deadline = 0, time.monotonic() + _GATHER.total_seconds()
    while (heard := runs.add(f"heard/{mine}", 0)) < world_size - 1:
        drawn = runs.add("drawn", 0)
        for number in range(answered + 1, drawn + 1):
            runs.set(f"answer/{number}", str(mine))
        answered = drawn
        if time.monotonic() > deadline:
            raise LaunchError(f"{heard + 1} of {world_size} ranks have started within {_GATHER}: look at the others")
        time.sleep(0.01)
    return str(mine)


def await_key(store: Any, key: str, or_else: str) -> None:
    """Wait until somebody has set ``key``. Raises ``LaunchError``, which begins with ``or_else``, where nobody does."""
    try:
        store.wait([key], _GATHER)
    except RuntimeError as error:
        raise LaunchError(f"{or_else} within {_GATHER}, or its machine is lost: {error}") from error
