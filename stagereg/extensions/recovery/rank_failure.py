"""Runs the emergency save on surviving ranks when other ranks fail. A saver registers itself with :func:`expect`.

A rank detects a failure of another rank in two ways: a thread of its failure monitor receives a report, or a collective
fails on its training thread. In both cases the saver saves once, on a separate thread and for a bounded time, while the
training thread waits. The ranks do not save if a rank has reported why it failed, such as an error in the program.
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

from stagereg.base.rank_failures import FailureResponse, response
from stagereg.errors import LaunchError, reason
from stagereg.extensions.recovery.failure_monitor import FailureMonitor
from stagereg.extensions.recovery.heartbeat import SHORT_TIMEOUT_S
from stagereg.launch.run_store import TIME_TO_END, RunStore

_TIMEOUTS = 3.0  # maximum duration of an emergency save, as a multiple of the heartbeat timeout
_HEARD_S = 5.0  # seconds to wait, after a collective failed, for the report of a failed rank
_POLL_INTERVAL_S = 0.02
_PUBLISH_S = 2.0
_NOT_SAVED = "The surviving ranks did not save: "


@dataclass(frozen=True)
class RankFailure:
    """The arguments of an emergency save on each surviving rank.

    ``store``: torch's rendezvous store, through which the surviving ranks coordinate (:func:`connect`). ``failed``
    returns the ranks that have failed so far, as :meth:`EmergencySave.failed_ranks`. ``timeout_s``: maximum seconds
    until a further failure is detected. ``until``: deadline at which this rank exits, by ``time.monotonic``.
    """

    rank: int
    world_size: int
    store: Any
    failed: Callable[[], Mapping[int, str]]
    timeout_s: float
    until: float

    def is_of(self, process: str) -> bool:
        """Return whether a process, such as ``process 12 on node3``, belonged to a failed rank."""
        return any(how.startswith(f"({process}):") for how in self.failed().values())


Save = Callable[[RankFailure], str]
"""Saves together with the other surviving ranks, and returns a sentence on the outcome."""


class EmergencySave(FailureResponse):
    """Runs the emergency save of one rank, at most once. Thread-safe.

    ``saved``: a sentence on the outcome of the save; empty before the save, and if there was nothing to save.
    """

    def __init__(self, store: RunStore, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._ranks = store, (rank, world_size)
        self.timeout_s, self._limit_s = timeout_s, _TIMEOUTS * timeout_s
        self.saved = ""
        self._saver: Callable[[], Save | None] = lambda: None  # returns the registered method, if any
        self.monitor: FailureMonitor | None = None
        self._lock = threading.Lock()
        self._began = False
        self._answered, self._over = threading.Event(), threading.Event()  # the store has answered; the save has ended

    def expect(self, save: Save) -> Callable[[str, Any], None]:
        """Register the bound method that saves after rank failures, as a weak reference. Replaces an earlier method.

        Returns a function that publishes a JSON value in the rendezvous store, which the method also receives.
        """
        self._saver = weakref.WeakMethod(save)
        self._store.set(TIME_TO_END, self._limit_s)
        return self._store.set

    def withdraw(self, save: Save) -> None:
        """Unregister a method, unless another one has replaced it. Idempotent."""
        if self._saver() == save:
            self._saver = lambda: None

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value for the launcher. Waits at most 2 seconds, because the store may have failed."""

        def publish() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

        publishing = threading.Thread(target=publish, name="stagereg-publish", daemon=True)
        publishing.start()
        publishing.join(_PUBLISH_S)

    def is_expected(self) -> bool:
        """Return whether a method is registered that saves after a rank failure."""
        return self._saver() is not None

    def shorten_timeout(self) -> None:
        """Shorten the failure detection timeout on all ranks, because this rank will exit soon. Idempotent."""
        self.timeout_s = min(self.timeout_s, SHORT_TIMEOUT_S)
        if self.monitor is not None:
            self.monitor.shorten_timeout()

    def failed_ranks(self) -> dict[int, str]:
        """Return the failed ranks, each with its process and its failure: ``(process 12 on node3): ...``."""
        return {} if self.monitor is None else {**self.monitor.failed}

    def describe(self, wait_s: float = 0.0) -> str:
        """Return sentences on failed ranks and the save, if any. Waits at most ``wait_s`` seconds for a failure."""
        text = "" if self.monitor is None else self.monitor.sentence(wait_s)
        return f"{text} {self.saved}".strip()

    def save(self) -> str:
        """Start the save, or join the running save. Return a sentence on the outcome; empty if nothing was saved."""
        with self._lock:
            first, self._began = not self._began, True
        until = time.monotonic() + self._limit_s
        saver = self._saver()
        if saver is None:
            return ""
        if first:
            name, args = "stagereg-emergency-save", (saver, until)
            threading.Thread(target=self._save, args=args, name=name, daemon=True).start()
        if not self._answered.wait(0.6 * self.timeout_s):  # a disconnected rank is killed after the full timeout
            self.saved = f"{_NOT_SAVED}the rendezvous store of this run does not answer."
        elif not self._over.wait(until - time.monotonic()):
            self.saved = f"{_NOT_SAVED}the emergency save took longer than {self._limit_s:g} s."
        return self.saved

    def await_saved(self) -> None:
        """Wait for the emergency save. Called after a collective has failed, possibly because a rank has failed."""
        ends = time.monotonic() + _HEARD_S
        while self._saver() is not None and not self.failed_ranks() and time.monotonic() < ends:
            with contextlib.suppress(RuntimeError):  # the rendezvous store has failed
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
                    self.monitor.give_time(self._limit_s)  # the store answers, so this rank is not disconnected
                self.saved = saver(RankFailure(*self._ranks, store, self.failed_ranks, self.timeout_s, until))
        except Exception as error:
            gone = type(error).__name__ in ("DistNetworkError", "DistStoreError")
            why = str(error) if isinstance(error, LaunchError) else reason(error)
            self.saved = f"{_NOT_SAVED}{'the rendezvous store of this run has failed.' if gone else why}"
        self._answered.set()
        self._over.set()


def connect(store: RunStore, limit_s: float) -> Any:
    """Return the rendezvous store with the keys of this attempt, over a new connection that no other thread uses.

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
        ends = "does not answer" if isinstance(error, TimeoutError) else "has failed"
        raise LaunchError(
            f"the rendezvous store of this run {ends}, so the surviving ranks cannot agree on a step. The next "
            "start resumes from the newest checkpoint, in the tier or in checkpoint storage."
        ) from error


def _expect_open(store: Any, limit_s: float) -> None:
    """Raise ``OSError`` if a store does not accept a connection. Torch's own client would retry for minutes."""
    while not hasattr(store, "port") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        socket.create_connection((store.host, store.port), limit_s).close()


def expect(save: Save) -> Callable[[str, Any], None] | None:
    """Register a saver with :meth:`EmergencySave.expect`. Return ``None`` if this process detects no rank failures."""
    current = response()
    return current.expect(save) if isinstance(current, EmergencySave) else None


def withdraw(save: Save) -> None:
    """Unregister a saver with :meth:`EmergencySave.withdraw`, if this process detects rank failures."""
    current = response()
    if isinstance(current, EmergencySave):
        current.withdraw(save)


def publish(key: str, value: Any) -> None:
    """Publish a value with :meth:`EmergencySave.publish`, if this process detects rank failures."""
    current = response()
    if isinstance(current, EmergencySave):
        current.publish(key, value)
