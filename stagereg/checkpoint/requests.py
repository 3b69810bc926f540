"""What ranks do together with all others, in a numbered list: each rank that does something puts it there first.

So a rank that has left its loop, and shadows the steps of the others, can do the same at the same step. And a rank that
has passed over something is found, in place of the others' waiting for it: all ranks run the same collectives, and
enter the same joins, in the same order, so one that has come to more of them than another had when it made an entry
will never come to that entry.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from stagereg.join.failure import collectives_of
from stagereg.kernel.channel import resources_of


class Requests:
    """This rank's end of the list, in the store of the process group.

    Args:
        group: of the ranks that train together; ``None`` for a process alone, where nothing is listed.
        name: the same on all ranks, and of nothing else in the job.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group
        self._store: Any = None if group is None else PrefixStore(f"stagereg/{name}", group.get_group_store())
        self._lock = threading.Lock()
        self._number = 0  # of entries that this rank has met
        self._suspected = 0

    def post(self, what: str = "") -> None:
        """This rank does ``what`` now; all others are to. On the training thread."""
        with self._lock:
            self._number += 1
            if self._store is not None:
                self._store.set(str(self._number), f"{self._position()} {what}")

    def take(self) -> str | None:
        """Return the next entry that this rank has not met, as it has left its loop, and count it as met."""
        with self._lock:
            entry = self._next()
            if entry is None:
                return None
            self._number += 1
            return entry[1]

    def missed(self) -> str | None:
        """Return an entry that this rank has passed over, and count it as met. On any thread, about once a second."""
        with self._lock:
            entry = self._next()
            if entry is None or entry[0] >= self._position():
                return None
            if self._suspected <= self._number:  # it may be about to do it: look once more
                self._suspected = self._number + 1
                return None
            self._number += 1
            return entry[1]

    def _next(self) -> tuple[int, str] | None:
        if self._store is None or not self._store.check([str(self._number + 1)]):
            return None
        position, what = self._store.get(str(self._number + 1)).decode().split(" ", 1)
        return int(position), what

    def _position(self) -> int:
        return position_in(self._group)


def position_in(group: dist.ProcessGroup | None) -> int:
    """Return how many collectives this rank has run, and how many joins it has entered."""
    return 0 if group is None else collectives_of(group) + resources_of(group).counts["join"]
