"""Joins inside joins: which are on, and that only the innermost is used.

A rank without data in the inner join answers what the inner one's joinables do. If the loop used the outer one's there,
nobody would answer, so that is an error. Around the inner join, as once an epoch, the outer one is used as ever.
"""

from __future__ import annotations

from collections.abc import Callable

from stagereg.errors import JoinError
from stagereg.kernel.membership import ActiveRanks, Membership

__all__ = ["enter", "leave"]


Configure = Callable[[Membership | None], None]
"""Gives a join's joinables another membership, or with ``None`` their own again."""

_on: list[Configure] = []


def enter(configure: Configure) -> None:
    """The join with this ``configure`` is on from now on; the one around it must not be used."""
    if _on:
        _on[-1](_Suspended())
    _on.append(configure)


def leave(configure: Configure) -> None:
    """That join is off; the one around it goes on. Harmless if it was not on."""
    if configure in _on:
        _on.remove(configure)
        if _on:
            _on[-1](None)


class _Suspended(Membership):
    def __init__(self) -> None:
        super().__init__(0, 1, False, lambda ready, what: None)

    def read(self) -> ActiveRanks:
        return ActiveRanks()

    def check(self) -> None:
        self._begin(True)

    def _begin(self, syncing: bool) -> None:
        raise JoinError(
            "a joinable of an outer join was used inside an inner one, where ranks without data do not answer it. "
            "Put all that the inner loop uses in the inner join, or in one join alone."
        )

    def _wait_for_next_step(self) -> ActiveRanks | None:
        return None
