"""Communication of the ranks of a run and their launcher through keys in the rendezvous store.

``torchrun --max-restarts`` starts the ranks again on the same store. Each start of all ranks is an *attempt* with its
own key prefix, so that no rank reads a key of a process that has died.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import stagereg.base.record as record
from stagereg.errors import LaunchError

GATHER_S = 600  # maximum seconds between the starts of the first and the last rank of a run
STEPPED = "stepped"  # key that a rank sets when it takes its first step
NEXT_START = "next start"  # key of rank 0's message if the next start skips the newest checkpoint
TIME_TO_END = "time to end"  # key of the time in seconds within which ranks exit after a kill


class RunStore:
    """The rendezvous store of a run, for one rank in one attempt. The launcher uses the number of its first local rank.

    ``store`` is torch's store; it fails if its machine fails. ``of_attempt`` is a view of it with the keys of this
    attempt, and ``group`` a view with the keys of the process group. ``ended`` is set when this rank's job has ended.
    """

    def __init__(self, store: Any, rank: int, world_size: int, attempt: str = "0") -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._all_attempts, self.attempt = store, attempt
        self.of_attempt: Any = PrefixStore(attempt, store)
        self.group = PrefixStore("group", self.of_attempt)
        self._rank = rank
        self._world_size = world_size
        self.ended = threading.Event()

    def begin(self, directory: str, resume: list[str]) -> None:
        """Publish the values that :meth:`run` returns, once for all attempts. Called on rank 0 or in the launcher."""
        if not self.begun():
            about = {"dir": directory, "resume": resume, "time": time.time(), "name": record.new_run()}
            self._all_attempts.set("run", json.dumps(about))

    def begun(self) -> bool:
        return bool(self._all_attempts.check(["run"]))

    def run(self) -> dict[str, Any]:
        """Wait until the run has begun. Return its directory ``dir``, its start ``time``, the ``resume`` overrides,
        and the name of the ``attempt``.
        """
        await_key(self._all_attempts, "run", "rank 0 did not begin the run")
        about = json.loads(self._all_attempts.get("run"))
        return {**about, "attempt": record.attempt_of(about["name"], self.attempt)}

    def set(self, key: str, value: Any) -> None:
        """Publish a JSON value under ``key``."""
        self.of_attempt.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return the value that was published under ``key``; ``None`` if no value was published."""
        return json.loads(self.of_attempt.get(key)) if self.of_attempt.check([key]) else None

    def add_error(self, text: str, kind: str = "errors") -> None:
        """Report an error of this rank. ``kind`` is ``"consequences"`` if another rank's exit caused the error."""
        self.of_attempt.append(kind, json.dumps([self._rank, text]) + "\n")

    def errors(self, kind: str = "errors") -> dict[int, str]:
        """Return the reported errors of the given kind, by rank."""
        lines = self.of_attempt.get(kind).splitlines() if self.of_attempt.check([kind]) else []
        return dict(sorted(json.loads(line) for line in lines))

    def is_first(self, text: str) -> bool:
        """Return True in the first call with this text on any rank of this attempt, and False in later calls."""
        text = text.encode("utf-8", "backslashreplace").decode()  # a key of the store must be UTF-8
        return bool(self.of_attempt.add(f"reported/{text}", 1) == 1)

    def set_ended(self) -> None:
        self.ended.set()
        self.of_attempt.set(f"ended/{self._rank}", "")

    def await_ended(self, limit_s: float, failed: Callable[[], Collection[int]]) -> None:
        """Wait until all ranks except ``failed()`` have ended their jobs, at most ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            lost = failed()
            ended = [f"ended/{rank}" for rank in range(self._world_size) if rank not in lost]
            if self.of_attempt.check(ended) or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def leave(self, key: str, value: Any) -> None:
        """Publish a JSON value for the next attempt."""
        self._all_attempts.set(key, json.dumps(value))

    def take(self, key: str) -> Any:
        """Return and delete a value that an earlier attempt published; ``None`` if no value was published."""
        if not self._all_attempts.check([key]):
            return None
        value = json.loads(self._all_attempts.get(key))
        self._all_attempts.delete_key(key)
        return value


def await_key(store: Any, key: str, failure: str) -> None:
    """Wait until a key of a store is set.

    Raises:
        LaunchError: The key is not set within :data:`GATHER_S` seconds; the message begins with ``failure``.
    """
    try:
        store.wait([key], timedelta(seconds=GATHER_S))
    except RuntimeError as error:
        raise LaunchError(f"{failure} within {GATHER_S} s, or its machine failed: {error}") from error
