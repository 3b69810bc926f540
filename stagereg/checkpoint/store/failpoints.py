"""Named crash points of a save (docs/commit-protocol.md). Tests kill a process at each of these points.

The code of a save calls :func:`failpoint` after each action of the commit. Tests register an observer by :func:`watch`.
"""

from __future__ import annotations

from collections.abc import Callable

_observer: Callable[[str], None] | None = None  # one per process: tests have no access to the save


def failpoint(name: str) -> None:
    """Call the observer, if any, with the name of a crash point. Any thread. Exceptions of the observer propagate."""
    if _observer is not None:
        _observer(name)


def watch(observer: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Set the observer of this process, which is called on the thread of the save. Return the previous observer."""
    global _observer
    before, _observer = _observer, observer
    return before
