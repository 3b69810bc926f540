"""Detects rank failures in a join: every surviving rank soon raises an error that names the failed rank and the cause.

A rank that raises publishes its error. A killed or frozen rank is found within seconds if a collective of another rank
breaks, otherwise within the timeout. If a rank is alive but does not reach a collective, the collective times out on
the other ranks. They then poll all ranks for two seconds, and report that rank and its step. A rank that finds a
failure aborts its process group, and :meth:`FailureDetector.explain` returns the cause.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import stagereg.kernel.broken as broken
from stagereg.base.option_text import option
from stagereg.errors import PeerFailedError, StageregError, UnevenInputsError, name_ranks
from stagereg.join.progress import Progress
from stagereg.kernel.broken import abort, backends_of, collectives_of, is_broken_operation, is_timeout
from stagereg.kernel.channel import HEARTBEAT_S, WorkerThread, resources_of

_GRACE_S = 2.0  # maximum seconds between two statuses of a live rank
_BEATS = int(_GRACE_S / HEARTBEAT_S)  # number of statuses that a rank publishes in ``_GRACE_S``
_MERCY_S = 0.6  # seconds that a rank gets to raise the error itself before its process group is aborted
_ANSWER_S = 1.0  # maximum seconds to wait for the thread's store calls and for other ranks' reports
_TURN_S = 0.2  # seconds between two checks of a wait
_LONGEST = 1000  # maximum characters of a rank's error in messages of other ranks
_NOTHING = "-"
_POLL_INTERVAL_S = 2.0  # seconds between two polls of the other ranks during a wait
_OTHER_CALLS = (
    "The ranks do not run the same collectives in the same order. A forward on one rank only is also a "
    "collective, unless it is under torch.no_grad()."
)
_CALLS = ("join.mean", "metrics.compute")  # collective calls, made by every rank that runs the loop body


class RankStatus(NamedTuple):
    """The latest status that a rank has published."""

    beat: int  # number of this status
    step: int | None = None  # current step of the program, if known
    waits_for: str = ""  # the event that the program currently waits for in :meth:`FailureDetector.wait`
    calls: Mapping[str, int] = {}  # how often the rank has waited in each of ``_CALLS``
    collectives: int = 0  # number of collectives that the rank has run in the process group
    elsewhere: bool = False  # whether the rank is outside the loop body, so that it makes none of ``_CALLS``
    progress: Progress = Progress()


class FailureDetector:
    """Detects failures of the other ranks of one join. Construct, start and stop one detector per join and rank.

    Call the methods on the thread that runs the training loop. No method is collective, so the group may contain ranks
    without a detector; these ranks are never suspected of having failed.

    The rendezvous store has one status key per rank, and one failure key for all ranks, which only the first failure
    sets. All store calls run on the group's heartbeat thread, because they may hang after the process that hosts the
    store has died. Each rank watches the next rank that has a status. If that status does not change for a long time,
    or if a collective fails, the rank reads all statuses twice. Ranks without a new status in between have failed. The
    thread measures time by its own iterations, because this process may be suspended too.

    ``timeout_s``: seconds that a rank may keep other ranks waiting, and within which a silent rank is found. ``name``:
    equal on all ranks, unique among the joins of the job. ``step``, ``elsewhere`` and ``progress`` return this rank's
    value of the field in :class:`RankStatus`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        name: str,
        step: Callable[[], int | None] = lambda: None,
        elsewhere: Callable[[], bool] = lambda: False,
        progress: Callable[[], Progress] = Progress,
    ) -> None:
        self.failure: PeerFailedError | UnevenInputsError | None = None
        self._group, self._timeout_s, self._name, self._step = weakref.ref(group), timeout_s, name, step
        self._grace_s = min(_GRACE_S, timeout_s / 5)
        self._patience = max(1, int(timeout_s / self._grace_s) - 3)  # maximum age of a status, in units of ``_grace_s``
        ranks = dist.get_process_group_ranks(group)
        here = group.rank()
        self._rank = ranks[here]
        self._others = [*ranks[here + 1 :], *ranks[:here]]
        self._running = self._outermost = False
        self._limits = contextlib.ExitStack()  # restores the timeouts of the backends
        self._elsewhere, self._progress, self._calls = elsewhere, progress, dict.fromkeys(_CALLS, 0)
        self._waits_for = ""
        self._own: PeerFailedError | UnevenInputsError | None = None  # the failure that this rank must publish
        self._poll: threading.Event | None = None  # the requested poll of all ranks; set when it has ended
        self._statuses: Mapping[int, RankStatus] = {}  # statuses of other ranks in the last poll
        self._left = threading.Event()
        self._ended = threading.Event()  # set when the thread has stopped detecting
        self._store_error = "it does not respond"
        self._thread: WorkerThread
        self._store: Any = None  # used only by the thread, like ``_beat``
        self._beat = 0

    def start(self) -> None:
        """Start to publish that this rank is alive, and to watch the other ranks. Does not block."""
        group = self._group()
        if not self._others or self._running or group is None:
            return
        self._running = True
        resources = resources_of(group)
        self._outermost, resources.watched = not resources.watched, True
        self._thread = resources.heartbeat if self._outermost else WorkerThread("stagereg-heartbeat-nested")
        for backend in backends_of(group):
            with contextlib.suppress(Exception):  # some backends have no timeout
                limit = backend.options._timeout
                backend._set_default_timeout(timedelta(seconds=self._timeout_s))
                self._limits.callback(backend._set_default_timeout, limit)
        self._store = PrefixStore(self._name, group.get_group_store())
        self._thread.submit(self._run, wake=False)

    def stop(self) -> None:
        """Restore the timeouts of the process group, and stop publishing and watching. Idempotent."""
        if self._running:
            self._running = False
            self._left.set()
            self._thread.closing = not self._outermost
            if self._outermost and (group := self._group()) is not None:
                resources_of(group).watched = False
            with contextlib.suppress(Exception):
                self._limits.close()

    def check(self) -> None:
        """Raise ``PeerFailedError`` if this rank has detected a failed rank."""
        if (error := self._known()) is not None:
            raise error

    def report(self, error: BaseException) -> None:
        """Publish that this rank leaves with ``error``, unless another rank caused the error. Never raises or hangs."""
        if isinstance(error, UnevenInputsError):
            self._publish(error)  # so that the other ranks raise the same error
        elif self._running and not isinstance(error, PeerFailedError):
            message = "".join(traceback.format_exception_only(error)).strip()[:_LONGEST]
            text = f"rank {self._rank} failed: {message}\nRead the output of rank {self._rank} for the cause."
            if isinstance(error, SystemExit):
                text = f"rank {self._rank} left the join alone, with {message}. Make all ranks leave at the same step."
            self._publish(PeerFailedError(text, self._rank, message))

    def explain(self, error: BaseException) -> StageregError | None:
        """Return the failure that broke a collective with ``error``; ``None`` if unknown. Takes up to four seconds."""
        if not self._running or not is_broken_operation(error):
            return None
        if is_timeout(error):
            self._overdue("a collective", self._timeout_s)
            return self._known()
        self._poll_all("a collective")
        self._ended.wait(_ANSWER_S)
        absent = self._absent()
        if absent and broken.is_lost_connection(error):  # a rank may have been killed before its first status
            advice = "If the process was killed on entering, read the end of its output."
            message = "has not entered this join, or has left, and a connection was lost"
            self._publish(_failure_of(absent, message, advice))
        return self._known()

    def wait(self, ready: Callable[[float], bool], what: str, limit_s: float = 0.0) -> None:
        """Wait until ``ready``, for at most ``timeout_s`` or ``limit_s``, plus the seconds to find the missing rank.

        ``ready(seconds)`` waits for at most the given seconds, and returns whether ``what`` has arrived.

        Raises: ``PeerFailedError`` if a rank has failed or some rank did not arrive in time. If ``ready`` raises
        because a rank has failed, that failure is raised instead.
        """
        limit_s = max(limit_s, self._timeout_s)
        ends, looks, stuck = time.monotonic() + limit_s, time.monotonic() + _POLL_INTERVAL_S, 0
        poll: threading.Event | None = None
        self._waits_for = what
        if what in self._calls:
            self._calls[what] += 1
        try:
            while not ready(_TURN_S):
                now = time.monotonic()
                if now > ends:
                    self._overdue(what, limit_s)
                elif now > looks and self._running and (poll is None or poll.is_set()):
                    stuck = stuck + 1 if poll is not None and self._all_went_on() else 0
                    if stuck == 2:  # messages sent before these collectives would have arrived by now
                        self._publish(self._left_behind(what))
                    poll = self._poll = threading.Event()
                    self._thread.wake.set()
                self.check()
        except RuntimeError as error:
            if not isinstance(error, StageregError) and (known := self.explain(error)) is not None:
                raise known from error
            raise
        finally:
            self._waits_for = ""

    def _all_went_on(self) -> bool:
        """Return whether all other ranks have run more collectives than this rank, which waits."""
        own = collectives_of(self._group())
        are_ahead = [each.collectives > own for each in self._statuses.values()]
        return len(are_ahead) == len(self._others) and all(are_ahead)

    def _left_behind(self, what: str) -> PeerFailedError:
        others = name_ranks(sorted(self._statuses))
        message = f"{others} reached a collective that rank {self._rank} does not run while it waits for {what}"
        return PeerFailedError(f"{message}. {_OTHER_CALLS}", None, message)

    def _overdue(self, what: str, limit_s: float) -> None:
        self._poll_all(what)
        if self.failure is None:
            self._publish(self._passed_over(what) or self._late(what, f"did not reach {what} within {limit_s:g} s"))

    def _passed_over(self, what: str) -> PeerFailedError | None:
        """Return an error if some ranks skipped a call in which other ranks wait, otherwise ``None``.

        All ranks run the same collectives in the same order. So a rank that has run more collectives skipped the call.
        """
        statuses = dict(sorted({**self._statuses, self._rank: self._status(what)}.items()))
        for call in _CALLS:
            callers = [rank for rank, each in statuses.items() if each.waits_for == call]
            if not callers:
                continue
            caller = statuses[callers[0]]
            here = {rank: each for rank, each in statuses.items() if not each.elsewhere}
            beyond = {rank: each for rank, each in here.items() if each.collectives > caller.collectives}
            missed = [rank for rank, each in beyond.items() if each.calls[call] < caller.calls[call]]
            if missed:
                where = "" if caller.step is None else f" in step {caller.step}"
                message = f"{name_ranks(callers)} called {call}{where}, {name_ranks(missed)} did not"
                return PeerFailedError(f"{message}. Call {call} on all ranks, not under `if rank == 0`.", None, message)
        return None

    def _status(self, waits_for: str) -> RankStatus:
        collectives = collectives_of(self._group())
        elsewhere, progress = self._elsewhere(), self._progress()
        return RankStatus(self._beat, self._step(), waits_for, self._calls, collectives, elsewhere, progress)

    def _late(self, what: str, within: str) -> PeerFailedError:
        statuses = self._statuses
        busy = {rank: status for rank, status in statuses.items() if not status.waits_for}
        if busy:
            advice = f"Raise {option('join.timeout')} if a step takes that long."
            return _failure_of(busy, f"is alive, but {within}", advice)
        absent = self._absent()
        if absent:
            advice = "All ranks must enter the same joins in the same order and leave them together."
            return _failure_of(absent, f"has not entered this join, or has left, and {within}", advice)
        others = ", ".join(f"rank {rank} for {each.waits_for}{_last_step(each)}" for rank, each in statuses.items())
        message = f"all ranks are alive and wait for each other: rank {self._rank} for {what}, {others}"
        return PeerFailedError(f"{message}. {_OTHER_CALLS}", None, message)

    def _absent(self) -> dict[int, RankStatus | None]:
        return dict.fromkeys(rank for rank in sorted(self._others) if rank not in self._statuses)

    def _known(self) -> StageregError | None:
        failure, text = self.failure, str(self.failure)
        if failure is None:
            return None
        if isinstance(failure, UnevenInputsError):
            return UnevenInputsError(text, failure.rank)
        if failure.rank == self._rank:
            text = f"the other ranks marked this rank as failed and continued without it: {text}"
        return PeerFailedError(text, failure.rank, failure.message)  # a new exception for each raise

    def _publish(self, failure: PeerFailedError | UnevenInputsError) -> None:
        """Publish a failure to all ranks, unless a failure is already known. Waits for at most one second."""
        if self.failure is None:
            self._own = failure
            self._thread.wake.set()
            self._ended.wait(_ANSWER_S)
            self.failure = self.failure or failure

    def _poll_all(self, waits_for: str) -> None:
        self._waits_for = waits_for
        poll = self._poll = threading.Event()
        self._thread.wake.set()
        ends = time.monotonic() + self._grace_s + _ANSWER_S
        while not (poll.wait(_TURN_S / 4) or self._ended.is_set() or time.monotonic() > ends):
            pass
        self._waits_for = ""
        if not poll.is_set() and self.failure is None:
            self.failure = PeerFailedError(
                f"the rendezvous store is gone ({self._store_error}), so the failed rank is unknown. The process "
                "that hosts the store, rank 0 or the launcher, was killed or frozen, or its machine failed. Read the "
                "end of that process's output first."
            )

    # The methods below run on the heartbeat thread.

    def _run(self) -> None:
        try:
            self._thread.wake.set()  # so that the first iteration does not wait
            self._watch()
            if self._beat and self.failure is None:
                self._store.delete_key(str(self._rank))
        except Exception as error:
            self._store_error = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._ended.set()
        if self.failure is not None and not self._left.wait(_MERCY_S) and (group := self._group()) is not None:
            abort(group)

    def _watch(self) -> None:
        watched: tuple[int, RankStatus] | None = None
        turns = unchanged = 0
        while self._turn() and not self._thread.closing:
            turns += 1
            if turns % _BEATS == 0:
                before, watched = watched, next(self._others_statuses(), None)
                unchanged = unchanged + 1 if watched == before else 0
                self._compare(dict([watched] if watched else []))
            if self._poll is not None or (watched is not None and unchanged >= self._patience):
                unchanged = 0
                self._look_at_all()

    def _turn(self) -> bool:
        self._thread.wake.wait(self._grace_s / _BEATS)
        self._thread.wake.clear()
        if self.failure is not None or (self._left.is_set() and self._own is None):
            return False
        self._beat += 1
        self._store.set(str(self._rank), pickle.dumps(self._status(self._waits_for)))
        self.failure = self._read("failure") if self._own is None else self._set_failure(self._own)
        return self.failure is None

    def _look_at_all(self) -> None:
        """Read all statuses twice, with a pause in which live ranks publish. Ranks without a new status have failed."""
        poll, self._poll = self._poll, None
        before = dict(self._others_statuses())
        for _ in range(_BEATS):
            if not self._turn():
                return
        self._statuses = after = dict(sorted(self._others_statuses()))
        self._compare(after)
        gone = {rank: status for rank, status in after.items() if before.get(rank) == status}
        if gone and self.failure is None:
            message = f"did not respond for at least {self._grace_s:g} s"
            advice = "The process was killed or frozen, or its machine failed. Read the end of its output."
            self.failure = self._set_failure(_failure_of(gone, message, advice))
        if poll is not None:
            poll.set()

    def _compare(self, statuses: Mapping[int, RankStatus]) -> None:
        own = self._progress()
        for rank, status in statuses.items():
            for who, one, other in ((rank, status.progress, own), (self._rank, own, status.progress)):
                if self.failure is None and (why := one.contradicts(other)):
                    self.failure = self._set_failure(PeerFailedError(f"rank {who} {why}.", who))

    def _set_failure(self, failure: PeerFailedError | UnevenInputsError) -> Any:
        return pickle.loads(self._store.compare_set("failure", "", pickle.dumps(failure)))

    def _read(self, key: str) -> Any:
        """Return the value of a key, or ``None`` if it is missing.

        ``get`` and ``check`` may wait for a missing key; ``compare_set`` does not.
        """
        value = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else pickle.loads(value)

    def _others_statuses(self) -> Iterator[tuple[int, RankStatus]]:
        for rank in self._others:
            status = self._read(str(rank))
            if status is not None:
                yield rank, status


def _failure_of(ranks: Mapping[int, RankStatus | None], message: str, advice: str) -> PeerFailedError:
    each = [f"rank {rank} {message}{_last_step(status)}" for rank, status in ranks.items()]
    return PeerFailedError(f"{'. '.join(each)}. {advice}", next(iter(ranks)), message)


def _last_step(status: RankStatus | None) -> str:
    return "" if status is None or status.step is None else f"; its last step was {status.step}"
