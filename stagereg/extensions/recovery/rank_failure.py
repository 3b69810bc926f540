"""What the surviving ranks do when ranks are lost, before they end: what is to be saved then registers here.

A rank detects a loss by its watch, on a thread, or by a failed collective, on the training thread. Either way what has
registered saves once, on its own thread, for a bounded time; the training thread waits. Nothing is saved if a rank has
reported a cause, such as an error in the program.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stagereg.errors import LaunchError, reason
from stagereg.extensions.recovery.failure_monitor import FailureMonitor
from stagereg.extensions.recovery.heartbeat import HURRIED_S
from stagereg.launch.run_store import RunStore

_NOTICES = 3.0  # times ``notice_s`` that a save after a loss may take
_HEARD_S = 5.0  # seconds from a broken collective to the report of the failed rank
_POLL_INTERVAL_S = 0.02
_PUBLISH_S = 2.0
_NOT_SAVED = "Those who are left have not saved: "


@dataclass(frozen=True)
class RankFailure:
    """What those who save are told, on each rank that is left.

    ``store`` is torch's, in which all who are left meet (:meth:`.RunStore.meet`). ``lost`` returns the ranks that are
    lost by now, as :meth:`.RunStore.lost_ranks`. ``notice_s`` is the time in which others are, and at ``until``
    (``time.monotonic``) this rank ends, whatever is under way.
    """

    rank: int
    world_size: int
    store: Any
    lost: Callable[[], Mapping[int, str]]
    notice_s: float
    until: float

    def is_lost(self, process: str) -> bool:
        """Whether a process, as ``process 12 on node3``, was that of a rank that is lost."""
        return any(how.startswith(f"({process}):") for how in self.lost().values())


class SavesAfterLoss(Protocol):
    """Something that can save what the ranks that are left have."""

    def save_after_loss(self, loss: RankFailure) -> str:
        """Save, together with the other ranks that are left, and return a sentence on what has come of it."""


class EmergencySave:
    """Saves once after a loss, on one rank; see the module. Thread-safe."""

    def __init__(self, store: RunStore, rank: int, world_size: int, notice_s: float) -> None:
        self._store, self._ranks = store, (rank, world_size)
        self.notice_s, self._limit_s = notice_s, _NOTICES * notice_s
        self.saver: Callable[[], SavesAfterLoss | None] = lambda: None  # returns what saves
        self.watch: FailureMonitor | None = None
        self._lock = threading.Lock()
        self._began = False
        self._answered, self._over = threading.Event(), threading.Event()  # the store has; the save has ended

    def expect(self, saver: SavesAfterLoss) -> Callable[[str, Any], None]:
        """Have ``saver``, which is held weakly, save after a loss, in place of an earlier one.

        Returns what publishes a value, as JSON, in the store that it will be given.
        """
        self.saver = weakref.ref(saver)
        self._store.set("saves after a loss", self._limit_s)
        return self._store.set

    def publish(self, key: str, value: Any) -> None:
        """Publish a value, as JSON, for the launcher; waits a moment for a store that may be gone."""

        def publish() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

        publishing = threading.Thread(target=publish, name="stagereg-publish", daemon=True)
        publishing.start()
        publishing.join(_PUBLISH_S)

    def hurry(self) -> None:
        """This rank is to end, so nobody is waited for who does not answer. As often as one likes."""
        self.notice_s = min(self.notice_s, HURRIED_S)
        if self.watch is not None:
            self.watch.hurry()

    def save(self) -> str:
        """Save, or wait for the thread that does; return a sentence on what has come of it, which may be empty."""
        with self._lock:
            first, self._began = not self._began, True
        until = time.monotonic() + self._limit_s
        saver = self.saver()
        if saver is None:
            return ""
        if first:
            threading.Thread(target=self._save, args=(saver, until), name="stagereg-survivors", daemon=True).start()
        if not self._answered.wait(0.6 * self.notice_s):  # a rank that is cut off is killed after all of it
            self._store.saved = f"{_NOT_SAVED}no store of this run answers."
        elif not self._over.wait(until - time.monotonic()):
            self._store.saved = f"{_NOT_SAVED}that has taken longer than {self._limit_s:g} s."
        return self._store.saved

    def await_saved(self) -> None:
        """Wait for the save of others' loss, where a collective has failed and that may be why."""
        ends = time.monotonic() + _HEARD_S
        while self.saver() is not None and not self._store.lost_ranks() and time.monotonic() < ends:
            with contextlib.suppress(RuntimeError):  # of the store, which is gone
                if self._store.get("cause is known"):
                    return
            time.sleep(_POLL_INTERVAL_S)
        if self._store.lost_ranks():
            self.save()

    def _save(self, saver: SavesAfterLoss, until: float) -> None:
        try:
            store = self._store.meet(self.notice_s / 6)
            known = store.check(["cause is known"])
            self._answered.set()
            if not known:
                self._store.give_time(self._limit_s)
                loss = RankFailure(*self._ranks, store, self._store.lost_ranks, self.notice_s, until)
                self._store.saved = saver.save_after_loss(loss)
        except Exception as error:
            gone = type(error).__name__ in ("DistNetworkError", "DistStoreError")
            why = str(error) if isinstance(error, LaunchError) else reason(error)
            self._store.saved = f"{_NOT_SAVED}{'the store of this run is gone.' if gone else why}"
        self._answered.set()
        self._over.set()


# Global because a process is one rank, and what saves is not given the launcher.
_of_process: EmergencySave | None = None


@contextlib.contextmanager
def of_process(after: EmergencySave) -> Iterator[None]:
    """Have :func:`expect` and :func:`await_saved` go to this one, in a ``with`` block."""
    global _of_process
    _of_process = after
    try:
        yield
    finally:
        _of_process = None


def expect(saver: SavesAfterLoss) -> Callable[[str, Any], None] | None:
    """Have ``saver`` save after a loss, as :meth:`EmergencySave.expect`; ``None`` if losses are not noticed."""
    return None if _of_process is None else _of_process.expect(saver)


def publish(key: str, value: Any) -> None:
    """Publish a value for the launcher, as :meth:`EmergencySave.publish`; nothing without our launcher."""
    if _of_process is not None:
        _of_process.publish(key, value)


def is_expected() -> bool:
    """Whether something saves after a loss."""
    return _of_process is not None and _of_process.saver() is not None


def hurry() -> None:
    """This process is asked to end by a signal; any thread, as often as one likes."""
    if _of_process is not None:
        _of_process.hurry()


def await_saved() -> None:
    """Wait for a save after a loss; to be called on the thread that trains before it lets go of what is saved."""
    if _of_process is not None:
        _of_process.await_saved()
