"""In a join, ranks that have left the training loop still take part in the loop's collectives, such as saves."""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """An object that runs collectives in the training loop, such as a checkpointer. All ranks must take part."""

    def follow(self) -> None:
        """Take part in the collectives of the other ranks' last step. Called on ranks that have left the loop."""

    def loop_ended(self) -> None:
        """Called when all ranks have left the loop. All ranks have taken part in the same collectives."""


followers: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Global, since a join and its followers have no reference to each other."""
