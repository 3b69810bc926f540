"""What ranks do together at a step of a plain loop, such as saving, also on ranks that have left the loop in a join."""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """Something that all ranks do together at a step, such as saving, also those that have left a plain loop."""

    def follow(self) -> None:
        """Do what ranks in the loop have done since the last step; on a rank that has left it, between two steps."""

    def loop_ended(self) -> None:
        """No rank is in the loop any more, and each has done what the others did."""


followers: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Global, as neither the join nor what follows it is given the other."""
