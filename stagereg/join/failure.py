"""When one rank of a join fails, every other rank ends soon, with an error that says which rank it was and why.

A rank that raises publishes its error. One that is killed or frozen is found in seconds where its peers' collectives
break, and within the timeout where nothing breaks. One that is alive but does not come lets the others' collectives
run out after the join's timeout; then they look for two seconds at what all ranks publish, and name it and its step.
A rank that knows of a failure aborts its own process group, and :meth:`FailureDetector.explain` says why.
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

from stagereg.base.option_text import option
from stagereg.errors import PeerFailedError, StageregError, UnevenInputsError, name_ranks
from stagereg.join.progress import Progress
from stagereg.kernel.broken import (
    abort,
    backends_of,
    collectives_of,
    is_broken_operation,
    is_lost_connection,
    is_timeout,
)
from stagereg.kernel.channel import HEARTBEAT_S, WorkerThread, resources_of

_GRACE_S = 2.0  # within which a rank that is alive publishes another status, at most
_BEATS = int(_GRACE_S / HEARTBEAT_S)  # statuses that a rank publishes in that time
_MERCY_S = 0.6  # in which a rank may leave by itself after another has failed: all may have raised the same, and go on
_ANSWER_S = 1.0  # for which the program waits for the thread's calls of the store, and for findings of other ranks
_TURN_S = 0.2
_LONGEST = 1000  # characters of a rank's error that the others print
_NOTHING = "-"
_POLL_INTERVAL_S = 2.0  # after which a rank that waits looks whether the others can still come
_OTHER_CALLS = (
    "They do not make the same calls in the same order. A forward on one rank alone is such a call, unless it is under "
    "torch.no_grad()."
)
_CALLS = ("join.mean", "metrics.compute")  # of the loop's body, for all ranks that run it


class RankStatus(NamedTuple):
    """What a rank has last published."""

    beat: int  # another number in each status
    step: int | None = None  # that its program is in, if it knows
    waits_for: str = ""  # what its program waits for under the detector
    calls: Mapping[str, int] = {}  # how often it has begun to wait for each of ``_CALLS``
    collectives: int = 0  # that it has run in the group
    elsewhere: bool = False  # than in the loop's body, where these calls are made
    progress: Progress = Progress()


class FailureDetector:
    """Ties a rank to the other ranks of one join. Make, start and stop one per join and rank; it is used once.

    Its methods are for the thread that runs the training loop. None is a collective, so ranks without a detector may be
    in the group, and are never suspected of having failed.

    In the store each rank has a key for its status, and there is one for the failure, which only the first to fail can
    set. A thread that is kept for the group makes all calls of the store, which may hang once the process that hosts it
    is gone. Each rank watches its next neighbour that has a status. If that has not changed for long, or a collective
    has failed, it reads all statuses twice, and gives up the ranks that have not written anew in between. Time is
    counted in the thread's turns, as this process may be stopped too.

    Args:
        group: whose ranks take part.
        timeout_s: that a rank may keep the others waiting, and within which one that publishes nothing is found.
        name: the same on all ranks, and of no other join of the job.
        step, elsewhere, progress: return what :class:`RankStatus` has of this rank under that name.
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
        self._patience = max(1, int(timeout_s / self._grace_s) - 3)  # multiples of the grace
        ranks = dist.get_process_group_ranks(group)
        here = group.rank()
        self._rank = ranks[here]
        self._others = [*ranks[here + 1 :], *ranks[:here]]
        self._running = self._outermost = False
        self._limits = contextlib.ExitStack()  # puts them back
        self._elsewhere, self._progress, self._calls = elsewhere, progress, dict.fromkeys(_CALLS, 0)
        self._waits_for = ""
        self._own: PeerFailedError | UnevenInputsError | None = None  # to be published
        self._poll: threading.Event | None = None  # the poll that was asked for; set when it is over
        self._statuses: Mapping[int, RankStatus] = {}  # what it has found
        self._left = threading.Event()
        self._ended = threading.Event()  # nothing more is found
        self._store_error = "it does not answer"
        self._thread: WorkerThread
        self._store: Any = None  # for the thread alone, as the beat
        self._beat = 0

    def start(self) -> None:
        """Begin to publish that this rank is alive, and to look at the others; does not wait for them."""
        group = self._group()
        if not self._others or self._running or group is None:
            return
        self._running = True
        resources = resources_of(group)
        self._outermost, resources.watched = not resources.watched, True
        self._thread = resources.heartbeat if self._outermost else WorkerThread("stagereg-heartbeat-nested")
        for backend in backends_of(group):
            with contextlib.suppress(Exception):  # not all have one
                limit = backend.options._timeout
                backend._set_default_timeout(timedelta(seconds=self._timeout_s))
                self._limits.callback(backend._set_default_timeout, limit)
        self._store = PrefixStore(self._name, group.get_group_store())
        self._thread.submit(self._run, wake=False)

    def stop(self) -> None:
        """Put the group's limit back; from now on this rank is not missed, and not aborted. Twice is harmless."""
        if self._running:
            self._running = False
            self._left.set()
            self._thread.closing = not self._outermost
            if self._outermost and (group := self._group()) is not None:
                resources_of(group).watched = False
            with contextlib.suppress(Exception):
                self._limits.close()

    def check(self) -> None:
        """Raise ``PeerFailedError`` if it is known here that a rank has failed."""
        if (error := self._known()) is not None:
            raise error

    def report(self, error: BaseException) -> None:
        """Publish that this rank leaves with ``error``, unless that is a consequence. Never raises, never hangs."""
        if isinstance(error, UnevenInputsError):
            self._publish(error)  # the others raise the same
        elif self._running and not isinstance(error, PeerFailedError):
            message = "".join(traceback.format_exception_only(error)).strip()[:_LONGEST]
            text = f"rank {self._rank} failed: {message}\nThe cause is there: read the output of rank {self._rank}."
            if isinstance(error, SystemExit):
                text = (
                    f"rank {self._rank} left the join by itself, with {message}. Let all ranks leave at the same step."
                )
            self._publish(PeerFailedError(text, self._rank, message))

    def explain(self, error: BaseException) -> StageregError | None:
        """Return, within four seconds, why a collective has failed here with ``error``; ``None`` if nobody knows."""
        if not self._running or not is_broken_operation(error):
            return None
        if is_timeout(error):
            self._overdue("a collective", self._timeout_s)
            return self._known()
        self._poll_all("a collective")
        self._ended.wait(_ANSWER_S)
        absent = self._absent()
        if absent and is_lost_connection(error):  # it may have been killed before its first status
            advice = "If it was killed as it entered: look at the end of its output."
            self._publish(_failure_of(absent, "is not in this join, or no more, and a connection was lost", advice))
        return self._known()

    def wait(self, ready: Callable[[float], bool], what: str, limit_s: float = 0.0) -> None:
        """Wait until ``ready``, for ``timeout_s`` or ``limit_s``, and the seconds that it takes to name a rank.

        ``ready`` waits for as many seconds as it is given at most, and returns whether ``what`` is there. If a rank has
        failed, or some did not come, that is a ``PeerFailedError``; what ``ready`` raises is explained if it can be.
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
                    if stuck == 2:  # what they had sent before they went on would have come since
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
        """Whether each other rank runs a collective that this one, as it waits, does not run."""
        own = collectives_of(self._group())
        return len(self._statuses) == len(self._others) and all(
            each.collectives > own for each in self._statuses.values()
        )

    def _left_behind(self, what: str) -> PeerFailedError:
        others = name_ranks(sorted(self._statuses))
        message = f"{others} went on to a collective that rank {self._rank} does not run, as it waits for {what}"
        return PeerFailedError(f"{message}. {_OTHER_CALLS}", None, message)

    def _overdue(self, what: str, limit_s: float) -> None:
        self._poll_all(what)
        if self.failure is None:
            self._publish(self._passed_over(what) or self._late(what, f"did not come to {what} within {limit_s:g} s"))

    def _passed_over(self, what: str) -> PeerFailedError | None:
        """Name the ranks that others wait for in a call that these have gone on without.

        All ranks run the same collectives in the same order, so one that has run more than a caller will not come.
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
                return PeerFailedError(f"{message}: call it on all ranks, and not under `if rank == 0`.", None, message)
        return None

    def _status(self, waits_for: str) -> RankStatus:
        collectives = collectives_of(self._group())
        elsewhere, progress = self._elsewhere(), self._progress()
        return RankStatus(self._beat, self._step(), waits_for, self._calls, collectives, elsewhere, progress)

    def _late(self, what: str, within: str) -> PeerFailedError:
        statuses = self._statuses
        busy = {rank: status for rank, status in statuses.items() if not status.waits_for}
        if busy:
            return _failure_of(
                busy, f"is alive, but {within}", f"Raise {option('join.timeout')} if that is how long a step takes."
            )
        absent = self._absent()
        if absent:
            advice = "All ranks have to enter the same joins in the same order, and none may leave by itself."
            return _failure_of(absent, f"is not in this join, or no more, and {within}", advice)
        others = ", ".join(f"rank {rank} for {each.waits_for}{_last_step(each)}" for rank, each in statuses.items())
        message = f"all ranks are alive and wait for each other, rank {self._rank} for {what}, {others}"
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
            text = f"the other ranks have given this one up, and went on without it: {text}"
        return PeerFailedError(text, failure.rank, failure.message)  # a new one each time it is raised

    def _publish(self, failure: PeerFailedError | UnevenInputsError) -> None:
        """Publish a failure to all ranks, unless one is known. It waits a second at most until that is done."""
        if self.failure is None:
            self._own = failure
            self._thread.wake.set()
            self._ended.wait(_ANSWER_S)
            self.failure = self.failure or failure

    def _poll_all(self, waits_for: str) -> None:
        """Find out which ranks are alive, and what they do; it is a failure if the store does not answer."""
        self._waits_for = waits_for
        poll = self._poll = threading.Event()
        self._thread.wake.set()
        ends = time.monotonic() + self._grace_s + _ANSWER_S
        while not (poll.wait(_TURN_S / 4) or self._ended.is_set() or time.monotonic() > ends):
            pass
        self._waits_for = ""
        if not poll.is_set() and self.failure is None:
            self.failure = PeerFailedError(
                f"the job's store is gone ({self._store_error}), so it is not known which rank failed. The process "
                "that hosts it, rank 0 or the launcher, was killed or frozen, or its machine is gone: look at the end "
                "of its output first."
            )

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            self._thread.wake.set()  # for the first turn
            self._watch()
            if self._beat and self.failure is None:
                self._store.delete_key(str(self._rank))
        except Exception as error:
            self._store_error = " ".join(f"it says {type(error).__name__}: {error}".split())[:200]
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
        """Wait a moment, publish, and read the failure; return whether this rank goes on."""
        self._thread.wake.wait(self._grace_s / _BEATS)
        self._thread.wake.clear()
        if self.failure is not None or (self._left.is_set() and self._own is None):
            return False
        self._beat += 1
        self._store.set(str(self._rank), pickle.dumps(self._status(self._waits_for)))
        self.failure = self._read("failure") if self._own is None else self._set_failure(self._own)
        return self.failure is None

    def _look_at_all(self) -> None:
        """Look at all statuses, and again when those that live have written anew; give up the ranks that have not."""
        poll, self._poll = self._poll, None
        before = dict(self._others_statuses())
        for _ in range(_BEATS):
            if not self._turn():
                return
        self._statuses = after = dict(sorted(self._others_statuses()))
        self._compare(after)
        gone = {rank: status for rank, status in after.items() if before.get(rank) == status}
        if gone and self.failure is None:
            message = f"did not answer for at least {self._grace_s:g} s"
            advice = "Such a process was killed or frozen, or its machine is gone: look at the end of its output."
            self.failure = self._set_failure(_failure_of(gone, message, advice))
        if poll is not None:
            poll.set()

    def _compare(self, statuses: Mapping[int, RankStatus]) -> None:
        """Find out whether a rank runs what this one does not, so that collectives of both do not belong together."""
        own = self._progress()
        for rank, status in statuses.items():
            for who, one, other in ((rank, status.progress, own), (self._rank, own, status.progress)):
                if self.failure is None and (why := one.contradicts(other)):
                    self.failure = self._set_failure(PeerFailedError(f"rank {who} {why}.", who))

    def _set_failure(self, failure: PeerFailedError | UnevenInputsError) -> Any:
        return pickle.loads(self._store.compare_set("failure", "", pickle.dumps(failure)))

    def _read(self, key: str) -> Any:
        """A value, or ``None``; without waiting for a key that is not there, as ``get`` does even after a ``check``."""
        value = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else pickle.loads(value)

    def _others_statuses(self) -> Iterator[tuple[int, RankStatus]]:
        """Read the statuses of the other ranks that are in the join, from the next rank on."""
        for rank in self._others:
            status = self._read(str(rank))
            if status is not None:
                yield rank, status


def _failure_of(ranks: Mapping[int, RankStatus | None], message: str, advice: str) -> PeerFailedError:
    each = [f"rank {rank} {message}{_last_step(status)}" for rank, status in ranks.items()]
    return PeerFailedError(f"{'. '.join(each)}. {advice}", next(iter(ranks)), message)


def _last_step(status: RankStatus | None) -> str:
    return "" if status is None or status.step is None else f"; it was last in step {status.step}"
