"""Collective work at a step of a plain loop, such as saving, for ranks that have left the loop in a join."""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """Collective work of all ranks at a step, such as saving, including ranks that have left a plain loop."""

    def follow(self) -> None:
        """Join the collectives of ranks in the loop since the last step. Called between steps on a rank outside it."""

    def loop_ended(self) -> None:
        """Handle the end of the loop: no rank is in it, and all have taken part in the same collectives."""


followers: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Global, since a join and its followers have no reference to each other."""
