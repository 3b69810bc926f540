"""Adds recovery to a run: heartbeats and emergency saves on the ranks, and restarts by the launcher."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import stagereg.launch.extension as launch
from stagereg.base.durations import seconds_of
from stagereg.base.rank_failures import responding
from stagereg.errors import ConfigError, LaunchError, at_least
from stagereg.extensions.recovery.failure_monitor import FailureMonitor
from stagereg.extensions.recovery.heartbeat import ENDED
from stagereg.extensions.recovery.rank_failure import EmergencySave
from stagereg.extensions.recovery.restarts import Restarts
from stagereg.extensions.recovery.run_secret import agreed_secret, given_secret
from stagereg.extensions.recovery.warm import WarmProcess, WarmStart
from stagereg.launch.command_line import number
from stagereg.launch.extension import Again, Cause, End, LaunchExtension, RankExtension, Refusal, Start, ThisRank
from stagereg.launch.run_store import await_key

_HEARD_S = 5.0  # seconds to wait, after an error of this rank, for the report of the failed rank that caused it
_MERCY_S = 2.0  # seconds in which a surviving rank can still report its own error before it is terminated
_TIMEOUT_S = 10.0  # heartbeat timeout if the config has none
_RESUME = "++checkpoint.resume=auto"


class RecoveryLauncher(LaunchExtension):
    """Restarts a failed run, at most ``restarts`` times without a new checkpoint. Forks ranks from :mod:`.warm`."""

    def __init__(self) -> None:
        self._restarts = Restarts(0)
        self._begins_elsewhere = False  # whether the first attempt begins from a checkpoint of another run
        self._warm: WarmStart | None = None

    def check(self, cfg: Any) -> bool:
        from omegaconf import OmegaConf  # imported here: ranks of programs without Hydra do not need it

        _checked_timeout(cfg)
        self._restarts = Restarts(at_least(0, "restarts", number(cfg, "restarts", 0)))
        self._begins_elsewhere = OmegaConf.select(cfg, "checkpoint.resume") not in (None, "auto")
        return self._restarts.most > 0

    def start(self, rank: int, start: Start) -> WarmProcess | None:
        return None if self._warm is None else self._warm.start(start)

    def poll(self, attempt: launch.Attempt) -> None:
        # A warm process that starts earlier would compete with the ranks for cores while they start.
        if self._restarts.most and self._warm is None and attempt.store.get("in job/0"):
            self._warm = WarmStart(attempt.start)

    def after(self, end: End) -> Again | Refusal | None:
        if self._restarts.most == 0 or not end.failed:
            return None
        try:
            refusal = self._refusal(end)
        except RuntimeError:  # the task that hosts the rendezvous store has failed
            return None
        if refusal is not None:
            return Refusal(refusal)
        # The run may have newer checkpoints than the checkpoint from which its first attempt resumed.
        return Again(str(self._restarts), (_RESUME,) if self._restarts.progressed and self._begins_elsewhere else ())

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()

    def _refusal(self, end: End) -> str | None:
        """Return why this run is not restarted, or ``None`` to restart it. The first task decides for all tasks."""
        restarts, attempt = self._restarts, end.attempt
        if attempt.store.get("comes again"):
            return ""
        key = f"refused {restarts.count}"
        if attempt.task.index > 0:
            refusal, restarts.progressed = json.loads(attempt.tasks.get(key))
            restarts.count += refusal is None
            return refusal if refusal is None else str(refusal)
        killed = min(end.codes.values(), default=0) < 0
        refusal = restarts.refusal(end.errors, killed, attempt.progress())
        attempt.tasks.set(key, json.dumps([refusal, restarts.progressed]))
        return refusal


class RecoveryRank(RankExtension):
    """Detects failures of other ranks while this rank runs its job; after an emergency save, terminates this rank."""

    def __init__(self) -> None:
        self._save: EmergencySave | None = None

    @contextlib.contextmanager
    def around(self, rank: ThisRank, cfg: Any) -> Iterator[None]:
        save = self._save = EmergencySave(rank.store, rank.rank, rank.world_size, _checked_timeout(cfg))
        ending = threading.Lock()

        def end(failed: str) -> None:
            if ending.acquire(blocking=False):  # only after the first failure; the monitor reports later failures too
                # Both calls may hang if the rendezvous store has failed too.
                threading.Thread(target=rank.note, args=(failed,), daemon=True).start()
                threading.Thread(target=self._end, args=(rank, save), daemon=True).start()

        with monitored(rank, save, end), responding(save):
            yield

    def failed_ranks(self) -> Collection[int]:
        return () if self._save is None else self._save.failed_ranks()

    def ending(self, error: Exception) -> None:
        if self._save is not None:
            self._save.await_saved()

    def cause(self) -> Cause | None:
        return None if self._save is None else _cause(self._save, _HEARD_S)

    def leave(self) -> None:
        if self._save is not None and self._save.monitor is not None:
            self._save.monitor.close()

    def _end(self, rank: ThisRank, save: EmergencySave) -> None:
        rank.end_after_failure(save.save, lambda: _cause(save, 0.0), min(_MERCY_S, save.timeout_s / 8))


@contextlib.contextmanager
def monitored(rank: ThisRank, save: EmergencySave, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Detect failures of other ranks in a ``with`` block. A thread calls ``on_failure(sentence)`` for each failure."""
    if rank.world_size == 1:
        yield
        return
    store = rank.store

    def connect(hub: list[Any] | None) -> list[Any]:
        if hub is not None:
            store.set("hub", hub)
            return hub
        await_key(store.of_attempt, "hub", "rank 0 did not start its job")
        return list(store.get("hub"))

    # The secret is valid for this attempt only, so leftover processes of an earlier attempt are rejected.
    secret = agreed_secret(store.of_attempt, rank.rank, rank.world_size, given_secret()) + store.attempt
    monitor = save.monitor = FailureMonitor(rank.rank, rank.world_size, save.timeout_s, secret, connect, on_failure)
    failed = False
    try:
        yield
    except Exception:
        failed = True  # the monitor stays open, to identify the failed ranks until this rank exits
        raise
    finally:
        if not failed:
            monitor.close()


def _cause(save: EmergencySave, wait_s: float) -> Cause:
    """Return the failure of other ranks, after waiting at most ``wait_s`` seconds for a report of a failure."""
    text = save.describe(wait_s)
    ended = all(how.endswith(ENDED) for how in save.failed_ranks().values())
    return Cause(text, bool(text) and ended and not save.saved)


def _checked_timeout(cfg: Any) -> float:
    """Return ``heartbeat_timeout`` of the config in seconds."""
    value = number(cfg, "heartbeat_timeout", _TIMEOUT_S)
    with contextlib.suppress(ConfigError):
        if not isinstance(value, bool) and 1 <= (seconds := seconds_of(str(value))) <= 3600:
            return seconds
    raise LaunchError(f"heartbeat_timeout={value} is not a duration from 1s to 1h. Write for example 10s.")


launcher, rank = RecoveryLauncher, RecoveryRank
