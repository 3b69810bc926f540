"""What the ranks of a run, and the launcher if there is one, write for each other into torch's store.

``torchrun --max-restarts`` starts the ranks again on the same store. Each start of all ranks is an *attempt* with a
prefix of its own, so that no rank reads a key of one that has died. Elastic's restart count cannot be that prefix: an
agent that follows the restart of another agent does not count it (:func:`name_attempt`).
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import stagereg.base.record as record
from stagereg.errors import LaunchError
from stagereg.extensions.recovery.failure_monitor import FailureMonitor
from stagereg.launch.run_secret import GATHER_S, agreed_secret, await_key, given_secret


class FailureNote:
    """What an attempt leaves for the next one, when it fails."""

    def __init__(self, all_attempts: Any, store: Any) -> None:
        self._all_attempts, self._store = all_attempts, store

    def leave(self, why: str) -> None:
        """Leave what has ended this attempt, unless a rank has; returns at once if so, or if the store is gone."""
        with contextlib.suppress(RuntimeError):
            if self._store.add("failed", 1) == 1:
                self._all_attempts.set("failure", json.dumps({"why": why, "noticed": time.time()}))

    def take(self) -> dict[str, Any] | None:
        """On rank 0, take that of the attempt before; ``None`` if there is none."""
        if not self._all_attempts.check(["failure"]):
            return None
        note = dict(json.loads(self._all_attempts.get("failure")))
        self._all_attempts.delete_key("failure")
        return note


class RunStore:
    """The store of a run, as one rank uses it in one attempt; the launcher uses it as rank 0 would.

    ``store`` is torch's, and nothing else uses it; it may fail with its machine. ``group`` is the store for the process
    group; ``failure`` is what the next attempt is told; ``ended`` is set once this rank has come to the end of its job;
    ``saved`` is a sentence on what was saved after a loss.
    """

    def __init__(self, store: Any, rank: int, world_size: int, attempt: str = "0") -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._all_attempts, self._attempt = store, attempt
        self._store: Any = PrefixStore(attempt, store)
        self.group = PrefixStore("group", self._store)
        self.failure = FailureNote(store, self._store)
        self._rank = rank
        self._world_size = world_size
        self.ended = threading.Event()
        self.saved = ""
        self._watch: FailureMonitor | None = None

    def begin(self, directory: str, resume: list[str]) -> None:
        """Publish what :meth:`run` returns, unless an earlier attempt has. On rank 0, or the launcher."""
        if not self.begun():
            about = {"dir": directory, "resume": resume, "time": time.time(), "name": record.new_run()}
            self._all_attempts.set("run", json.dumps(about))

    def begun(self) -> bool:
        return bool(self._all_attempts.check(["run"]))

    def run(self) -> dict[str, Any]:
        """The run's directory ``dir``, its ``time``, the overrides to ``resume`` it, and the name of this ``attempt``.

        Waits until the run has begun.
        """
        await_key(self._all_attempts, "run", "rank 0 did not begin")
        about = json.loads(self._all_attempts.get("run"))
        return {**about, "attempt": record.attempt_of(about["name"], self._attempt)}

    def set(self, key: str, value: Any) -> None:
        """Report ``value``, which JSON has, under a name."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """What was reported under this name; ``None`` if nothing was."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def add_error(self, text: str, kind: str = "errors") -> None:
        """Report an error of this rank to the launcher, or what came of another rank's end (``"consequences"``)."""
        self._store.append(kind, json.dumps([self._rank, text]) + "\n")

    def errors(self, kind: str = "errors") -> dict[int, str]:
        """What was reported of this kind, by rank."""
        lines = self._store.get(kind).splitlines() if self._store.check([kind]) else []
        return dict(sorted(json.loads(line) for line in lines))

    def is_first(self, text: str) -> bool:
        """Return True for the first rank that reports this text, and False for all later ones."""
        return bool(self._store.add(f"reported/{text}", 1) == 1)

    def set_ended(self) -> None:
        self.ended.set()
        self._store.set(f"ended/{self._rank}", "")

    def await_ended(self, limit_s: float) -> None:
        """Wait until all ranks have ended, at most ``limit_s`` seconds. Raises ``LaunchError`` if ranks are lost."""
        deadline = time.monotonic() + limit_s
        while True:
            lost = self.lost_ranks()
            if limit_s == math.inf and lost:
                raise LaunchError(self.lost(0.0))
            ended = [f"ended/{rank}" for rank in range(self._world_size) if rank not in lost]
            if self._store.check(ended) or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    @contextlib.contextmanager
    def watch(self, notice_s: float, on_lost: Callable[[str], None]) -> Iterator[FailureMonitor | None]:
        """Know of lost ranks, in a ``with`` block; ``on_lost`` is called with a sentence, on another thread."""
        if self._world_size == 1:
            yield None
            return

        def meet(hub: list[Any] | None) -> list[Any]:
            if hub is not None:
                self.set("hub", hub)
                return hub
            await_key(self._store, "hub", "rank 0 did not come to its job")
            return list(self.get("hub"))

        # Of this attempt alone: a process that an earlier one has left is a stranger.
        secret = agreed_secret(self._store, self._rank, self._world_size, given_secret()) + self._attempt
        self._watch = FailureMonitor(self._rank, self._world_size, notice_s, secret, meet, on_lost)
        failed = False
        try:
            yield self._watch
        except Exception:
            failed = True  # the rank hears who is lost, until it leaves
            raise
        finally:
            if not failed:
                self.leave()

    def leave(self) -> None:
        """This rank ends, and the others are not to take that for a loss. Twice is harmless."""
        if self._watch is not None:
            self._watch.close()

    def lost_ranks(self) -> dict[int, str]:
        """The ranks that are lost, each with its process and how it was lost: ``(process 12 on node3): ...``."""
        return {} if self._watch is None else {**self._watch.lost}

    def meet(self, limit_s: float) -> Any:
        """Return torch's store with this attempt's keys, over a connection that no other thread waits in.

        Raises:
            LaunchError: the store does not answer within ``limit_s`` seconds.
        """
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                _expect_open(self._store, limit_s)
                store = self._store.clone()
                store.check(["hub"])
                answer.set_result(store)
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

    def give_time(self, seconds: float) -> None:
        """Let this rank live so much longer that cannot hear of rank 0: the store answers, so it is not cut off."""
        if self._watch is not None:
            self._watch.give_time(seconds)

    def lost(self, for_s: float) -> str:
        """The ranks that are lost, or become so within so many seconds, as a sentence; else nothing."""
        return "" if self._watch is None else self._watch.sentence(for_s)


def name_attempt(store: Any, rank: int, world_size: int) -> str:
    """The name of this attempt, the same on all its ranks and of no earlier one on ``store``.

    Each process draws a number, and rank 0's is the name. Rank 0 answers every number drawn until all ranks have read
    an answer; one to a process of an earlier attempt is read by none.
    """
    mine = store.add("drawn", 1)
    if rank > 0:
        await_key(store, f"answer/{mine}", "rank 0 did not start")
        name: str = store.get(f"answer/{mine}").decode()
        store.add(f"received/{name}", 1)
        return name
    answered, deadline = 0, time.monotonic() + GATHER_S
    while (received := store.add(f"received/{mine}", 0)) < world_size - 1:
        drawn = store.add("drawn", 0)
        for number in range(answered + 1, drawn + 1):
            store.set(f"answer/{number}", str(mine))
        answered = drawn
        if time.monotonic() > deadline:
            raise LaunchError(f"{received + 1} of {world_size} ranks have started in {GATHER_S} s: look at the others")
        time.sleep(0.01)
    return str(mine)


def _expect_open(store: Any, limit_s: float) -> None:
    """Raise ``OSError`` if a store takes no connection; torch's own tries for as long as a rank may be late."""
    while not hasattr(store, "port") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        socket.create_connection((store.host, store.port), limit_s).close()
