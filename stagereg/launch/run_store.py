"""What the ranks of a run, and the launcher if there is one, write for each other into torch's store.

``torchrun --max-restarts`` starts the ranks again on the same store. Each start of all ranks is an *attempt* with a
prefix of its own, so that no rank reads a key of a process that has died.
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

GATHER_S = 600  # seconds in which the ranks of a run may start one after another
STEPPED = "stepped"  # the key that a rank sets when it takes its first step
NEXT_START = "next start"  # the key of what rank 0 publishes of the next start, if that skips the newest checkpoint
TIME_TO_END = "time to end"  # the key of the seconds that ranks may take to end once one has died


class RunStore:
    """The store of a run, as one rank uses it in one attempt; the launcher uses it as rank 0 would.

    ``store`` is torch's, and nothing else uses it; it may fail with its machine. ``of_attempt`` is the part of it with
    the keys of this attempt, and ``group`` the part for the process group. ``ended`` is set once this rank has come to
    the end of its job.
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
        return {**about, "attempt": record.attempt_of(about["name"], self.attempt)}

    def set(self, key: str, value: Any) -> None:
        """Report ``value``, which JSON has, under a name."""
        self.of_attempt.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """What was reported under this name; ``None`` if nothing was."""
        return json.loads(self.of_attempt.get(key)) if self.of_attempt.check([key]) else None

    def add_error(self, text: str, kind: str = "errors") -> None:
        """Report an error of this rank to the launcher, or what came of another rank's end (``"consequences"``)."""
        self.of_attempt.append(kind, json.dumps([self._rank, text]) + "\n")

    def errors(self, kind: str = "errors") -> dict[int, str]:
        """What was reported of this kind, by rank."""
        lines = self.of_attempt.get(kind).splitlines() if self.of_attempt.check([kind]) else []
        return dict(sorted(json.loads(line) for line in lines))

    def is_first(self, text: str) -> bool:
        """Return True for the first rank that reports this text, and False for all later ones."""
        return bool(self.of_attempt.add(f"reported/{text}", 1) == 1)

    def set_ended(self) -> None:
        self.ended.set()
        self.of_attempt.set(f"ended/{self._rank}", "")

    def await_ended(self, limit_s: float, failed: Callable[[], Collection[int]]) -> None:
        """Wait until all ranks have ended except those that have ``failed``, at most ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            lost = failed()
            ended = [f"ended/{rank}" for rank in range(self._world_size) if rank not in lost]
            if self.of_attempt.check(ended) or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def leave(self, key: str, value: Any) -> None:
        """Leave a value, which JSON has, for the next attempt."""
        self._all_attempts.set(key, json.dumps(value))

    def take(self, key: str) -> Any:
        """Take a value that an earlier attempt has left; ``None`` if there is none."""
        if not self._all_attempts.check([key]):
            return None
        value = json.loads(self._all_attempts.get(key))
        self._all_attempts.delete_key(key)
        return value


def await_key(store: Any, key: str, failure: str) -> None:
    """Wait for a key of a store.

    Raises:
        LaunchError: it does not come in :data:`GATHER_S` seconds; ``failure`` says what that means.
    """
    try:
        store.wait([key], timedelta(seconds=GATHER_S))
    except RuntimeError as error:
        raise LaunchError(f"{failure} in {GATHER_S} s, or its machine is lost: {error}") from error
