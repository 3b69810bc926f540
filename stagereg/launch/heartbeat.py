"""Which ranks of several machines are alive: each writes a word into the run's store, over and over, for who asks.

The agent of a machine sees how its own ranks end, and nobody sees it of the others: a rank whose machine is lost just
stops talking. An error of gloo or NCCL names an address at best, and comes from whoever happened to talk to it.

The words go over the rank's connection to the store, whose calls take turns with those of other threads. Where the
store itself is gone, the thread ends, and it is for the program to notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

__all__ = ["Heartbeat", "place", "silent"]

_BEAT_S = 1.0
"""Seconds between two words of a rank."""
_LOOK_S = 0.1


class Heartbeat:
    """The words of one rank, for the time of a ``with`` block.

    Args:
        store: of the run; its ranks alone use it.
        rank: this one.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._key = store, _key(rank)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stagereg-pulse", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._say(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_BEAT_S)

    def _beat(self) -> None:
        beat = 0
        with contextlib.suppress(Exception):
            while not self._over.wait(_BEAT_S):
                beat += 1
                self._say(beat)

    def _say(self, beat: int) -> None:
        self._store.set(self._key, json.dumps([beat, f"process {os.getpid()} on {socket.gethostname()}"]))


def silent(store: Any, ranks: Iterable[int], for_s: float) -> list[int]:
    """Those of ``ranks`` that say nothing new for so long; it waits that long only where there is one."""
    words = {rank: _word(store, rank) for rank in ranks}
    deadline = time.monotonic() + for_s
    while words and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        words = {rank: word for rank, word in words.items() if _word(store, rank) == word}
    return sorted(words)


def place(store: Any, rank: int) -> str:
    """Process and machine of a rank, in words."""
    word = _word(store, rank)
    return "nothing is known of it" if word is None else json.loads(word)[1]


def _word(store: Any, rank: int) -> bytes | None:
    return store.get(_key(rank)) if store.check([_key(rank)]) else None


def _key(rank: int) -> str:
    return f"pulse/{rank}"
