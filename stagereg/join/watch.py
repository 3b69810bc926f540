"""A thread that tells the other ranks, over the job's store, that this one is alive, and hears how they are.

It writes this rank's word every few seconds, and looks at the bell a few times a second. Who has news, or a question,
writes and then rings; at a ring everybody writes and everybody reads. There is no collective, and nobody waits.

Who is silent is found in two steps. Each rank watches the next one that has said a word, which is enough: of the ranks
that are left one stands before one that is gone. If that one says nothing new for long, or a collective has failed, a
rank rings, and who has not written anew a short while later is given up. Only this rank's own clock is read, and time
in which this process itself did not run does not count. Ranks that have said nothing yet, or goodbye, are no suspects.

The store's host may itself be gone, and then calls fail or hang: all of them are made here, in a daemon thread, and the
program only ever reads what the thread has left for it. What to make of it is left to ``alarm``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from stagereg.join.board import Failure, RankStatus, StatusStore, location

__all__ = ["HeartbeatThread", "PollResult"]

_LOOK_S = 0.2
"""Seconds between two looks at the bell, at most."""
_PULSE_S = 2.0
"""Seconds between two words of a rank that has nothing to say, at most."""
_GRACE_S = 2.0
"""Seconds that ranks have to answer a ring, at most."""
_MERCY_S = 0.6
"""Seconds in which a rank may leave by itself after another has failed: all may have raised the same, and go on."""
_SLEPT_S = 0.8
"""Seconds between two looks that count at most; what is more, this process did not run."""


@dataclass(frozen=True)
class PollResult:
    """The answers to a ring.

    Attributes:
        call: which of this rank's calls it answers.
        words: the last word of every other rank that has said one and no goodbye.
    """

    call: int
    words: Mapping[int, RankStatus]


class HeartbeatThread(threading.Thread):
    """The thread of one rank in one join.

    Args:
        group: whose store is used.
        name: the same on all ranks, and of no other join of the job.
        rank: this one.
        ranks: all, in the same order everywhere.
        timeout_s: seconds within which a rank that has gone silent is to be found.
        on_failure: called in this thread, once, if the program does not leave soon after a failure is known.

    Attributes:
        failure: the first one that is known, or ``None``.
        roll: the last one that is complete.
        lost: what the store's call failed with, after which this thread has ended; empty while all is well.
        news: set whenever one of these has changed; for whoever waits.
        notes: what the program wants to be known of where it is; replaced, never changed.
        waits: as in :class:`RankStatus`.
        grace_s: seconds that a call of the roll takes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(name="stagereg-detector", daemon=True)
        self.failure: Failure | None = None
        self.roll = PollResult(0, {})
        self.lost = ""
        self.news = threading.Event()
        self.notes: dict[str, object] = {}
        self.waits = ""
        self.grace_s = min(_GRACE_S, timeout_s / 4)
        self._pulse_s = min(_PULSE_S, timeout_s / 6)
        self._look_s = min(_LOOK_S, self.grace_s / 4)
        self._patience_s = timeout_s - 2 * self._pulse_s - self.grace_s
        self._group, self._name, self._rank = group, name, rank
        here = ranks.index(rank)
        self._others = [*ranks[here + 1 :], *ranks[:here]]
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._calls = 0
        self._to_tell: Failure | None = None
        self._mercy_s = _MERCY_S
        self._told = threading.Event()
        self._leaving = False
        # From here on the thread's own.
        self._beat = 0
        self._next_beat = 0.0
        self._rung = 0
        self._answered = 0
        self._rolling: tuple[float, int, Mapping[int, RankStatus]] | None = None
        self._watched: tuple[int, RankStatus] | None = None
        self._since = 0.0
        self._now = 0.0  # seconds in which this process ran
        self._acted = False
        self._due: float | None = None

    def poll_all(self) -> int:
        """Ask the other ranks to say a word; returns the number that ``roll.call`` reaches when their time is over."""
        self._calls += 1
        self._wake.set()
        return self._calls

    def await_news(self, enough: Callable[[], bool], wait_s: float) -> None:
        """Return when a failure is known, the store is gone, ``enough`` is true or ``wait_s`` is over."""
        deadline = time.monotonic() + wait_s
        while self.failure is None and not self.lost and not enough():
            if (left := deadline - time.monotonic()) <= 0:
                return
            self.news.wait(min(left, _LOOK_S))
            self.news.clear()

    def tell(self, failure: Failure, wait_s: float) -> None:
        """Tell all ranks of a failure, unless one is known. It waits ``wait_s`` at most until that is done."""
        if self.failure is None:
            self._mercy_s = 0.0
            self.failure = self._to_tell = failure
            self._wake.set()
            if self.is_alive():
                self._told.wait(wait_s)
            else:
                self._act()

    def leaves_with(self, failure: Failure, wait_s: float) -> None:
        """As :meth:`tell`, for a program that is about to leave with a failure of its own: nothing is aborted here."""
        if self.failure is None:
            self._acted = True
            self.tell(failure, wait_s)

    def leave(self, wait_s: float) -> None:
        """Say goodbye, unless there is a failure to be read, and end this thread; wait so long for it at most."""
        self._leaving = True
        self._wake.set()
        self.join(wait_s)

    def run(self) -> None:
        """What the thread does."""
        try:
            store = StatusStore(self._group.get_group_store(), self._name)
            last = time.monotonic()
            while not self._leaving:
                now = time.monotonic()
                self._now += min(now - last, _SLEPT_S)
                last = now
                self._turn(store)
                self._wake.wait(self._look_s)
                self._wake.clear()
            self._say_goodbye(store)
        except Exception as error:
            self.lost = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._act()
        self._told.set()
        self.news.set()

    def _turn(self, store: StatusStore) -> None:
        self._publish(store)
        if (rung := store.notifications()) != self._rung:
            self._rung = rung
            self._say(store)
            self._hear(self._read_all(store))
        if self._calls != self._answered and self._rolling is None:
            self._open_roll(store)
        if self._now >= self._next_beat:
            self._say(store)
            self._watch_next(store)
        if self._rolling is not None and self._now >= self._rolling[0]:
            self._close_roll(store)
        suspect = self._silence() > self._patience_s and self._rolling is None and self.failure is None
        if suspect and self._watch_next(store):
            self.poll_all()
        self._act()

    def _say(self, store: StatusStore) -> None:
        self._beat += 1
        self._next_beat = self._now + self._pulse_s
        notes = {key: str(value) for key, value in self.notes.items()}
        store.write(self._rank, RankStatus(self._beat, notes, self.waits, self._to_tell))

    def _publish(self, store: StatusStore) -> None:
        if self._to_tell is not None and not self._told.is_set():
            self._say(store)
            store.notify()
            self._told.set()

    def _say_goodbye(self, store: StatusStore) -> None:
        self._publish(store)
        if self._to_tell is None and self._beat:
            store.erase(self._rank)

    def _read_all(self, store: StatusStore) -> dict[int, RankStatus]:
        return {rank: word for rank in self._others if (word := store.read(rank)) is not None}

    def _hear(self, words: Mapping[int, RankStatus]) -> None:
        told = [word.failure for word in words.values() if word.failure is not None]
        if told and self.failure is None:
            self.failure = min(told, key=lambda failure: failure.when)
            self.news.set()

    def _open_roll(self, store: StatusStore) -> None:
        before = self._read_all(store)  # before the ring, or an answer could be taken for an old word
        self._say(store)
        store.notify()
        self._rolling = self._now + self.grace_s, self._calls, before

    def _close_roll(self, store: StatusStore) -> None:
        assert self._rolling is not None
        _, call, before = self._rolling
        self._rolling = None
        words = self._read_all(store)
        self._hear(words)
        silent = [rank for rank, word in words.items() if rank in before and word.beat == before[rank].beat]
        if silent and self.failure is None:
            self._mercy_s = 0.0
            self._give_up({rank: words[rank] for rank in sorted(silent)})
            self._publish(store)
        self._answered = call
        self.roll = PollResult(call, words)
        self.news.set()

    def _give_up(self, silent: Mapping[int, RankStatus]) -> None:
        watched = self._watched is not None and self._watched[0] in silent
        silence_s = max(self.grace_s, self._silence() if watched else 0.0)
        silence = f"heard of for at least {round(silence_s, 1) if silence_s < 10 else round(silence_s):g} s"
        each = [f"rank {r} has not been {silence}{location(word, '; it was last in ')}" for r, word in silent.items()]
        ended = "Its process was" if len(silent) == 1 else "Their processes were"
        text = f"{'. '.join(each)}. {ended} killed or frozen, or the machine is gone: look at the end of its output."
        self.failure = self._to_tell = Failure(tuple(silent), f"not {silence}", text)

    def _silence(self) -> float:
        return self._now - self._since

    def _watch_next(self, store: StatusStore) -> bool:
        """Look at the next rank that has said a word; return whether it is the same word as before."""
        found = next(((rank, word) for rank in self._others if (word := store.read(rank)) is not None), None)
        same = found == self._watched
        if not same:
            self._watched, self._since = found, self._now
        return same and found is not None

    def _act(self) -> None:
        if self.failure is None or self._acted or self._leaving:
            return
        if self._due is None:
            self._due = self._now + self._mercy_s
        if self._now >= self._due:
            self._acted = True
            self._on_failure()
            self.news.set()
