"""The emergency save of surviving ranks when other ranks fail: what makes the save registers here (:func:`expect`).

A rank detects a rank failure by its failure monitor, on a thread, or by a failed collective, on the training thread.
Either way the saver saves once, on a thread of its own, for a bounded time; the training thread waits. Nothing is saved
if a rank has reported a cause, such as an error in the program.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stagereg.base.rank_failures import response
from stagereg.errors import LaunchError, reason
from stagereg.extensions.recovery.failure_monitor import FailureMonitor
from stagereg.extensions.recovery.heartbeat import SHORT_TIMEOUT_S
from stagereg.launch.run_store import TIME_TO_END, RunStore

_TIMEOUTS = 3.0  # times the heartbeat timeout that an emergency save may take
_HEARD_S = 5.0  # seconds from a broken collective to the report of the failed rank
_POLL_INTERVAL_S = 0.02
_PUBLISH_S = 2.0
_NOT_SAVED = "The surviving ranks did not save: "


@dataclass(frozen=True)
class RankFailure:
    """The arguments of an emergency save on each surviving rank.

    Attributes:
        store: the rendezvous store of torch, for the agreements of the surviving ranks (:func:`connect`).
        failed: returns the ranks that have failed so far, as :meth:`EmergencySave.failed_ranks`.
        timeout_s: seconds until another failure is detected.
        until: deadline at which this rank exits, by ``time.monotonic``.
    """

    rank: int
    world_size: int
    store: Any
    failed: Callable[[], Mapping[int, str]]
    timeout_s: float
    until: float

    def is_of(self, process: str) -> bool:
        """Whether a process, as ``process 12 on node3``, was that of a failed rank."""
        return any(how.startswith(f"({process}):") for how in self.failed().values())


Save = Callable[[RankFailure], str]
"""Saves together with the other surviving ranks, and returns a sentence on the outcome."""


class EmergencySave:
    """Saves once after rank failures, on one rank; see the module. Thread-safe.

    Attributes:
        saved: a sentence on the outcome of the save; empty before the save, and if there was nothing to save.
    """

    def __init__(self, store: RunStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._ranks = store, (rank, world_size)
        self.timeout_s, self._limit_s = timeout_s, _TIMEOUTS * timeout_s
        self.saved = ""
        self._saver: Callable[[], Save | None] = lambda: None  # returns what saves
        self.monitor: FailureMonitor | None = None
        self._lock = threading.Lock()
        self._began = False
        self._answered, self._over = threading.Event(), threading.Event()  # the store has; the save has ended

    def expect(self, save: Save) -> Callable[[str, Any], None]:
        """Register a bound method, held weakly, that saves after rank failures; replaces an earlier method.

        Return a function that publishes a value, as JSON, in the store that the method receives.
        """
        self._saver = weakref.WeakMethod(save)
        self._store.set(TIME_TO_END, self._limit_s)
        return self._store.set

    def withdraw(self, save: Save) -> None:
        """Unregister a method, unless another one has replaced it. Idempotent."""
        if self._saver() == save:
            self._saver = lambda: None

    def publish(self, key: str, value: Any) -> None:
        """Publish a value, as JSON, for the launcher; waits a moment for a store that may be gone."""

        def publish() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

        publishing = threading.Thread(target=publish, name="stagereg-publish", daemon=True)
        publishing.start()
        publishing.join(_PUBLISH_S)

    def is_expected(self) -> bool:
        """Whether something saves after a rank failure."""
        return self._saver() is not None

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout on all ranks, since this rank will exit. Idempotent."""
        self.timeout_s = min(self.timeout_s, SHORT_TIMEOUT_S)
        if self.monitor is not None:
            self.monitor.shorten_timeout()

    def failed_ranks(self) -> dict[int, str]:
        """Return the failed ranks, each with its process and its failure: ``(process 12 on node3): ...``."""
        return {} if self.monitor is None else {**self.monitor.failed}

    def describe(self, wait_s: float = 0.0) -> str:
        """Return sentences on the ranks that have failed, or fail within that time, and on the save; may be empty."""
        text = "" if self.monitor is None else self.monitor.sentence(wait_s)
        return f"{text} {self.saved}".strip()

    def save(self) -> str:
        """Save, or wait for the thread that saves; return a sentence on the outcome, which may be empty."""
        with self._lock:
            first, self._began = not self._began, True
        until = time.monotonic() + self._limit_s
        saver = self._saver()
        if saver is None:
            return ""
        if first:
            threading.Thread(
                target=self._save, args=(saver, until), name="stagereg-emergency-save", daemon=True
            ).start()
        if not self._answered.wait(0.6 * self.timeout_s):  # a rank that is cut off is killed after all of it
            self.saved = f"{_NOT_SAVED}the rendezvous store of this run does not answer."
        elif not self._over.wait(until - time.monotonic()):
            self.saved = f"{_NOT_SAVED}the emergency save took longer than {self._limit_s:g} s."
        return self.saved

    def await_saved(self) -> None:
        """Wait for the emergency save, if a collective has failed and a rank failure may be the cause."""
        ends = time.monotonic() + _HEARD_S
        while self._saver() is not None and not self.failed_ranks() and time.monotonic() < ends:
            with contextlib.suppress(RuntimeError):  # the rendezvous store is gone
                if self._store.get("cause is known"):
                    return
            time.sleep(_POLL_INTERVAL_S)
        if self.failed_ranks():
            self.save()

    def _save(self, saver: Save, until: float) -> None:
        try:
            store = connect(self._store, self.timeout_s / 6)
            known = store.check(["cause is known"])
            self._answered.set()
            if not known:
                if self.monitor is not None:
                    self.monitor.give_time(self._limit_s)  # the store answers, so this rank is not cut off
                failure = RankFailure(*self._ranks, store, self.failed_ranks, self.timeout_s, until)
                self.saved = saver(failure)
        except Exception as error:
            gone = type(error).__name__ in ("DistNetworkError", "DistStoreError")
            why = str(error) if isinstance(error, LaunchError) else reason(error)
            self.saved = f"{_NOT_SAVED}{'the rendezvous store of this run is gone.' if gone else why}"
        self._answered.set()
        self._over.set()


def connect(store: RunStore, limit_s: float) -> Any:
    """Return torch's store with the keys of this attempt, over a connection that no other thread waits in.

    Raises:
        LaunchError: the store does not answer within ``limit_s`` seconds.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            _expect_open(store.of_attempt, limit_s)
            connection = store.of_attempt.clone()
            connection.check(["hub"])
            answer.set_result(connection)
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="stagereg-meet", daemon=True).start()
    try:
        return answer.result(limit_s)
    except (RuntimeError, OSError) as error:
        ends = "does not answer" if isinstance(error, TimeoutError) else "is gone"
        raise LaunchError(
            f"the rendezvous store of this run {ends}, so the surviving ranks cannot agree on a step. The next "
            "start resumes from the newest checkpoint, in the tier or in checkpoint storage."
        ) from error


def _expect_open(store: Any, limit_s: float) -> None:
    """Raise ``OSError`` if a store takes no connection; torch's own tries for as long as a rank may be late."""
    while not hasattr(store, "port") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        socket.create_connection((store.host, store.port), limit_s).close()


def expect(save: Save) -> Callable[[str, Any], None] | None:
    """Register ``save`` as :meth:`EmergencySave.expect`; return ``None`` if rank failures are not detected."""
    current = response()
    return current.expect(save) if isinstance(current, EmergencySave) else None


def withdraw(save: Save) -> None:
    """Unregister ``save`` as :meth:`EmergencySave.withdraw`."""
    current = response()
    if isinstance(current, EmergencySave):
        current.withdraw(save)


def publish(key: str, value: Any) -> None:
    """Publish a value for the launcher, as :meth:`EmergencySave.publish`; nothing without our launcher."""
    current = response()
    if isinstance(current, EmergencySave):
        current.publish(key, value)
