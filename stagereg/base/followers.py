"""Lets ranks that have left a plain loop in a join take part in later collectives of the loop, such as saves."""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """Work with collectives at a step, such as a save, in which ranks that have left the loop must take part."""

    def follow(self) -> None:
        """Take part in the collectives of the loop since the last step. Called on ranks that have left the loop."""

    def loop_ended(self) -> None:
        """Handle the end of the loop: all ranks have left it and have taken part in the same collectives."""


followers: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Global, since a join and its followers have no reference to each other."""
