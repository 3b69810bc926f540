"""What the ranks of a join tell each other over the job's store: a word each, and one bell for all.

Each rank keeps one key, its last word: a counter that grows, where its program is, and what went wrong if something
did. One more key is the bell, a counter that is not there while all is well. A rank that leaves erases its key, so a
join in which all went well leaves nothing in the store.

When to write, ring and look is left to ``watch``. Nothing here waits for another rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["Failure", "RankStatus", "StatusStore", "location"]

_NOTHING = "-"


@dataclass(frozen=True)
class Failure:
    """Why the ranks of a join cannot go on.

    Attributes:
        ranks: global ranks that failed; empty where nobody could say which.
        message: what the first of them said, or how it ended.
        text: all of it, for people on the other ranks.
        when: seconds since the epoch, to tell a cause from what came after it.
    """

    ranks: tuple[int, ...]
    message: str
    text: str
    when: float = field(default_factory=time.time)


@dataclass(frozen=True)
class RankStatus:
    """What a rank has last said.

    Attributes:
        beat: grows from word to word.
        notes: where its program is.
        waits: what its program waits for under this alarm, empty if it does not.
        failure: why it cannot go on.
    """

    beat: int
    notes: Mapping[str, str]
    waits: str = ""
    failure: Failure | None = None

    def pack(self) -> str:
        """As the store has it."""
        told = self.failure and [self.failure.ranks, self.failure.message, self.failure.text, self.failure.when]
        return json.dumps([self.beat, dict(self.notes), self.waits, told])

    @classmethod
    def unpack(cls, packed: bytes) -> RankStatus:
        """Of what :meth:`pack` made."""
        beat, notes, waits, told = json.loads(packed)
        return cls(beat, notes, waits, told and Failure(tuple(told[0]), *told[1:]))


def location(word: RankStatus, before: str = "") -> str:
    """Where a rank was by its last word, such as ``step 3, exit``, with ``before`` in front unless it did not say."""
    named = {"step": "step ", "where": ""}
    parts = [f"{named.get(key, f'{key} ')}{word.notes[key]}" for key in sorted(word.notes, key=_first_step)]
    return before + ", ".join(parts) if parts else ""


def _first_step(key: str) -> tuple[int, str]:
    return ("step", "where").index(key) if key in ("step", "where") else 2, key


class StatusStore:
    """The keys of one join in the store. A call waits for the store's answer, however long that takes.

    Args:
        store: of the process group. Its calls take turns with those of other threads, so nobody may wait in one for
            long. A connection of its own would spare that, but each new one may cost the store's server the seconds of
            a reverse name lookup.
        name: of the join.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = PrefixStore(name, store)

    def write(self, rank: int, word: RankStatus) -> None:
        """Replace the word of ``rank``."""
        self._store.set(str(rank), word.pack())

    def read(self, rank: int) -> RankStatus | None:
        """The last word of ``rank``; ``None`` if it has said none yet, or goodbye."""
        found = self._look(str(rank))
        return None if found is None else RankStatus.unpack(found)

    def erase(self, rank: int) -> None:
        """Say goodbye for ``rank``: nothing of it stays."""
        self._store.delete_key(str(rank))

    def notify(self) -> None:
        """Call everybody. What was written before is there to be read."""
        self._store.add("bell", 1)

    def notifications(self) -> int:
        """How many times the bell has rung in this join."""
        return int(self._look("bell") or 0)

    def _look(self, key: str) -> bytes | None:
        """A value, without waiting for a key that is not there, as ``get`` does after ``check`` said it was."""
        value: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else value
