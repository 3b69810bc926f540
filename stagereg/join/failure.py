"""When one rank of a join fails, every other rank ends soon, with an error that says which rank it was and why.

Without it a rank whose partner has raised, died, frozen or got stuck waits in its collective until the process group's
timeout, half an hour by default, and then learns nothing. With a :class:`FailureDetector` per rank and join:

* a rank that raises publishes its error; the others know it within about a quarter of a second;
* a rank that is killed or frozen publishes nothing more: it is found in seconds where its peers' collectives break, as
  gloo's do when a process is gone, and within the timeout where nothing breaks;
* a rank that is alive but does not come lets the others' collectives run out after the join's timeout instead of the
  process group's; then they poll all ranks, for two seconds at most, and name it and the step that it was last in.

A rank that knows of a failure aborts its own process group. So a program that waits in a collective, also one inside
DDP's backward, returns at once with an error of the backend, and :meth:`FailureDetector.explain` turns that into one
that says why. A group that was aborted is unusable: end the program, or make a new group.

The ranks communicate over the job's store, on a thread that is kept for the process group. When
to report and what to raise is left to the join.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from stagereg.errors import PeerFailedError, StageregError
from stagereg.kernel.channel import WorkerThread, resources_of

__all__ = [
    "Failure",
    "FailureDetector",
    "RankStatus",
    "StatusStore",
    "abort",
    "is_broken_operation",
    "is_timeout",
    "limit_of",
    "limit_operations",
    "was_aborted",
]

_LOOK_S = 0.2
"""Seconds between two looks at the store, at most."""
_PULSE_S = 2.0
"""Seconds between two statuses of a rank that has nothing new to report, at most."""
_GRACE_S = 2.0
"""Seconds that ranks have to answer a poll, at most."""
_MERCY_S = 0.6
"""Seconds in which a rank may leave by itself after another has failed: all may have raised the same, and go on."""
_SLEPT_S = 0.8
"""Seconds between two looks that count at most; what is more, this process did not run."""
_PUBLISH_S = 1.0
"""Seconds that publishing a failure may take; it needs them only if the store does not answer."""
_FINDING_S = 1.0
"""Seconds that the finding of another rank may take to arrive once this rank's own poll is over."""
_TURN_S = 0.2
_LONGEST = 1000
"""Characters of a rank's error that the others print."""
_IN_COLLECTIVE = "a collective that did not finish"
_TAG = 0x57A6E
"""Of a receive that no rank sends for; a tag that no program uses."""
_TORCHS_LIMIT_S = 1800.0
_TIMEOUT = r"Timed out waiting \d+ ?ms|pair closure|operation timeout|Operation timed out!|wait timeout|Socket Timeout"
_BROKEN = rf"gloo|nccl|c10d|{_TIMEOUT}"


@dataclass(frozen=True)
class Failure:
    """Why the ranks of a join cannot go on.

    Attributes:
        ranks: global ranks that failed; empty where it is not known which.
        message: what the first of them raised, or how it ended.
        text: all of it, for people on the other ranks.
        when: seconds since the epoch, to tell a cause from what came after it.
    """

    ranks: tuple[int, ...]
    message: str
    text: str
    when: float = field(default_factory=time.time)


@dataclass(frozen=True)
class RankStatus:
    """What a rank has last published.

    Attributes:
        beat: grows from status to status.
        step: that its program is in, if it knows.
        waits_for: what its program waits for under the detector, empty if it does not.
        failure: why it cannot go on.
    """

    beat: int
    step: int | None = None
    waits_for: str = ""
    failure: Failure | None = None

    def location(self, before: str) -> str:
        """``before`` and the step, for a message; empty where that is not known."""
        return "" if self.step is None else f"{before}step {self.step}"


class StatusStore:
    """The keys of one join in the job's store: the last status of each rank, and a counter of notifications.

    The counter is not there while all is well, and a rank that leaves erases its status. So a join in which all went
    well leaves nothing. A call waits for the store's answer, however long that takes, but never for another rank.

    Args:
        store: of the process group. Its calls take turns with those of other threads. A connection of its own would
            spare that, but each new one may cost the store's server the seconds of a reverse name look-up.
        name: of the join.
    """

    _NOTHING = "-"

    def __init__(self, store: Store, name: str) -> None:
        self._store: Any = PrefixStore(name, store)

    def write(self, rank: int, status: RankStatus) -> None:
        """Replace the status of ``rank``."""
        self._store.set(str(rank), pickle.dumps(status))

    def read(self, rank: int) -> RankStatus | None:
        """The last status of ``rank``; ``None`` if there is none yet, or it was erased."""
        found = self._look(str(rank))
        return None if found is None else pickle.loads(found)

    def erase(self, rank: int) -> None:
        """Remove the status of ``rank``."""
        self._store.delete_key(str(rank))

    def notify(self) -> None:
        """Have every rank write its status and read the others'. What was written before is there to be read."""
        self._store.add("notifications", 1)

    def notifications(self) -> int:
        """How many times a rank has notified the others in this join."""
        return int(self._look("notifications") or 0)

    def _look(self, key: str) -> bytes | None:
        """A value, without waiting for a key that is not there, as ``get`` does even after a ``check``."""
        value: bytes = self._store.compare_set(key, self._NOTHING, self._NOTHING)
        return None if value == self._NOTHING.encode() else value


class FailureDetector:
    """Ties a rank to the other ranks of one join. Make, start and stop one per join and rank; it is used once.

    Its methods are for the thread that runs the training loop. None of them is a collective, so ranks without a
    detector may be in the group, and are never suspected of having failed.

    A thread that is kept for the group writes this rank's status every few seconds, and reads the counter of
    notifications a few times a second. A rank that has news, or polls, writes and then notifies; then every rank writes
    and reads all.

    Ranks that publish nothing more are found in two steps. Each rank watches its next live neighbour, so every dead
    rank has one live rank watching it. If that one has published nothing new for long, or a collective has failed, a
    rank polls all, and ranks that have not written anew a short while later are given up. Only this rank's own clock is
    read, and time in which this process itself did not run does not count. Ranks that have published nothing yet, or
    have left, are not suspected.

    The process that hosts the store may itself be gone, and then calls fail or hang. So all of them are made on that
    thread, and the program only reads the attributes.

    Args:
        group: whose ranks take part.
        timeout_s: seconds that a rank may keep the others waiting, and within which one that publishes nothing is
            found.
        name: the same on all ranks, and of no other join of the job.
        step: returns the step that this rank is in, for the messages of others; ``None`` where that is not known.

    Attributes:
        failure: the first one that is known, or ``None``.
        answered: the number of the last poll that is complete.
        statuses: the answers to it: the last status of every other rank that is in the join.
        lost: what the store's call failed with, after which nothing more is found; empty while all is well.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        name: str,
        step: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.failure: Failure | None = None
        self.answered = 0
        self.statuses: Mapping[int, RankStatus] = {}
        self.lost = ""
        self._group, self._timeout_s, self._name, self._step = group, timeout_s, name, step
        self._grace_s = min(_GRACE_S, timeout_s / 4)
        self._pulse_s = min(_PULSE_S, timeout_s / 6)
        self._look_s = min(_LOOK_S, self._grace_s / 4)
        self._patience_s = timeout_s - 2 * self._pulse_s - self._grace_s
        ranks = dist.get_process_group_ranks(group)
        here = group.rank()
        self._rank = ranks[here]
        self._others = [*ranks[here + 1 :], *ranks[:here]]
        self._running = False
        self._reported = False
        self._restore: Callable[[], None] = lambda: None
        self._waits_for = ""
        self._news = threading.Event()  # set whenever one of the attributes has changed
        self._wake = threading.Event()
        self._polls = 0
        self._to_publish: Failure | None = None
        self._published = threading.Event()
        self._mercy_s = _MERCY_S
        self._aborting = threading.Lock()  # held while the group is aborted, so that it never is after stop()
        self._aborts = True
        self._leaving = False
        # From here on the thread's own.
        self._store: Any = None
        self._beat = 0
        self._next_beat = 0.0
        self._notified = 0
        self._polling: tuple[float, int, Mapping[int, RankStatus]] | None = None
        self._watched: tuple[int, RankStatus] | None = None
        self._since = 0.0
        self._now = 0.0  # seconds in which this process ran
        self._due: float | None = None

    def start(self) -> None:
        """Begin to publish that this rank is alive, and to look at the others; does not wait for them.

        Operations on the group, and on its channels that are not polled, may last ``timeout_s`` until :meth:`stop`. In
        a group of one rank it does nothing.
        """
        if not self._others or self._running:
            return
        self._running = True
        resources = resources_of(self._group)
        self._restore = limit_operations([self._group, *resources.backends(polled=False)], self._timeout_s)
        thread = resources.heartbeat
        thread.submit(lambda: self._run(thread))

    def stop(self) -> None:
        """Put the group's limit back; from now on this rank is not missed, and not aborted. Twice is harmless.

        The thread erases this rank's status, unless it has published a failure; no caller waits for that.
        """
        if self._running:
            self._running = False
            with self._aborting:
                self._leaving = True
            self._wake.set()
            self._restore()

    def check(self) -> None:
        """Return at once while no failure is known here.

        Raises:
            PeerFailedError: a rank has failed.
        """
        if (error := self._known()) is not None:
            raise error

    def report(self, error: BaseException) -> None:
        """Publish that this rank leaves with ``error``. Never raises, never hangs.

        The other ranks abort their groups if they do not leave by themselves within a second, as they do where all
        ranks raise the same on purpose and go on.

        A :class:`PeerFailedError`, and any error once a failure is known, is a consequence and not published. Let
        :meth:`explain` see the error of a collective first: it may be a consequence of what is not known here yet.
        """
        if not self._running or isinstance(error, PeerFailedError):
            return
        self._reported = True
        message = _summary(error)
        text = f"rank {self._rank} failed: {message}\nThe cause is there: read the output of rank {self._rank}."
        self.publish(Failure((self._rank,), message, text), abort=False)

    def explain(self, error: BaseException) -> PeerFailedError | None:
        """Find out why a collective has failed here with ``error``; takes about three seconds, and four at most.

        Returns:
            What to raise from ``error``; ``None`` if it does not look like a collective's, which is decided at once, or
            if all ranks are well and none knows a reason. Then ``error`` stands alone.
        """
        if not self._running or not is_broken_operation(error):
            return None
        self._waits_for = _IN_COLLECTIVE
        poll = self.poll_all() if self.failure is None else 0
        ran_out = is_timeout(error)
        self._await_news(lambda: ran_out and self.answered >= poll, self._grace_s + _FINDING_S)
        self._await_news(lambda: self.answered >= poll, _FINDING_S)
        self._waits_for = ""
        known = self._known()
        if known is None and self.answered < poll:
            known = _store_gone(self.lost)
        elif known is None and ran_out:
            known = self._conclude("the collective that this rank was in")
        return known

    def wait(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait until ``ready``, and no longer than ``timeout_s``.

        Args:
            ready: waits for as many seconds as it is given at most, and returns whether what is waited for is there.
            what: that, for the message.

        Raises:
            PeerFailedError: a rank has failed, or some did not come. What ``ready`` raises is explained if it can be.
        """
        start = time.monotonic()
        poll = 0
        self._waits_for = what
        try:
            while not self._ready(ready):
                self.check()
                waited = time.monotonic() - start
                if self._running and not poll and waited > self._timeout_s - self._grace_s - _TURN_S:
                    poll = self.poll_all()  # so that the answers are there when the time is over
                if waited > self._timeout_s:
                    break
            else:
                return
        finally:
            self._waits_for = ""
        if not self._running:
            raise PeerFailedError(f"the other ranks did not come to {what} within {self._timeout_s:g} s.")
        self._await_news(lambda: self.answered >= poll, _FINDING_S)
        self.check()
        if self.answered < poll:
            raise _store_gone(self.lost)
        raise self._conclude(what)

    def poll_all(self) -> int:
        """Ask the other ranks for their status; returns the number that :attr:`answered` reaches when it is over."""
        self._polls += 1
        self._wake.set()
        return self._polls

    def publish(self, failure: Failure, abort: bool = True) -> None:
        """Publish a failure to all ranks, unless one is known. It waits a second at most until that is done.

        Args:
            failure: what has failed.
            abort: abort the group here too. False: the program is about to leave by itself.
        """
        if self.failure is None:
            self._mercy_s = 0.0
            self._aborts = abort
            self.failure = self._to_publish = failure
            self._wake.set()
            self._published.wait(_PUBLISH_S)
            if self.lost:
                self._act()

    def _await_news(self, enough: Callable[[], bool], wait_s: float) -> None:
        """Return when a failure is known, the store is gone, ``enough`` is true or ``wait_s`` is over."""
        deadline = time.monotonic() + wait_s
        while self.failure is None and not self.lost and not enough():
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._news.wait(min(left, _LOOK_S))
            self._news.clear()

    def _ready(self, ready: Callable[[float], bool]) -> bool:
        began = time.monotonic()
        try:
            if ready(_TURN_S):
                return True
        except StageregError:
            raise
        except RuntimeError as error:
            if (known := self.explain(error)) is not None:
                raise known from error
            raise
        if time.monotonic() - began < _TURN_S / 10:  # it did not wait
            time.sleep(_TURN_S / 20)
        return False

    def _known(self) -> PeerFailedError | None:
        failure = self.failure
        if not self._running or failure is None:
            return None
        text = failure.text
        if self._rank in failure.ranks and not self._reported:
            text = f"the other ranks have given this one up, and went on without it: {text}"
        return PeerFailedError(text, next(iter(failure.ranks), None), failure.message)

    def _conclude(self, what: str) -> PeerFailedError:
        """Publish which ranks did not come to ``what``, by the answers to a poll, and return what to raise."""
        self.publish(self._late(what))
        known = self._known()
        assert known is not None
        return known

    def _late(self, what: str) -> Failure:
        """Return which ranks kept the others waiting; those that answered are alive."""
        statuses = self.statuses
        late = {rank: status for rank, status in sorted(statuses.items()) if not status.waits_for}
        absent = [rank for rank in sorted(self._others) if rank not in statuses]
        if late:
            ranks = tuple(late)
            message = f"alive, but did not come to {what} within {self._timeout_s:g} s"
            each = [f"rank {rank} is {message}{status.location('; it was last in ')}" for rank, status in late.items()]
            advice = "Raise join.timeout if that is how long a step takes."
        elif absent:
            ranks = tuple(absent)
            message = f"not in this join, or no more, and did not come to {what} within {self._timeout_s:g} s"
            each = [f"rank {rank} is {message}" for rank in absent]
            advice = "All ranks have to enter the same joins in the same order, and none may leave by itself."
        else:
            ranks = ()
            message = f"all ranks are alive and wait for each other, this one for {what}"
            others = (f"rank {r} for {s.waits_for}{s.location(', in ')}" for r, s in sorted(statuses.items()))
            each = [", ".join([message, *others])]
            advice = "They do not make the same calls in the same order."
        return Failure(ranks, message, f"{'. '.join(each)}. {advice}")

    def _run(self, thread: WorkerThread) -> None:
        try:
            self._store = StatusStore(self._group.get_group_store(), self._name)
            last = time.monotonic()
            self._write()
            while not self._leaving and not thread.closing:
                self._wake.wait(self._look_s)
                self._wake.clear()
                now = time.monotonic()
                self._now += min(now - last, _SLEPT_S)
                last = now
                if not self._leaving:
                    self._turn()
            self._write_failure()
            if self._to_publish is None:
                self._store.erase(self._rank)
        except Exception as error:
            self.lost = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._act()
        self._published.set()
        self._news.set()

    def _turn(self) -> None:
        self._write_failure()
        if (notified := self._store.notifications()) != self._notified:
            self._notified = notified
            self._write()
            self._learn(self._read_all())
        if self._polls != self.answered and self._polling is None:
            self._open_poll()
        if self._now >= self._next_beat:
            self._write()
            self._watch_next()
        if self._polling is not None and self._now >= self._polling[0]:
            self._close_poll()
        suspect = self._now - self._since > self._patience_s and self._polling is None and self.failure is None
        if suspect and self._watch_next():
            self.poll_all()
        self._act()

    def _write(self) -> None:
        self._beat += 1
        self._next_beat = self._now + self._pulse_s
        self._store.write(self._rank, RankStatus(self._beat, self._step(), self._waits_for, self._to_publish))

    def _write_failure(self) -> None:
        if self._to_publish is not None and not self._published.is_set():
            self._write()
            self._store.notify()
            self._published.set()

    def _read_all(self) -> dict[int, RankStatus]:
        return {rank: status for rank in self._others if (status := self._store.read(rank)) is not None}

    def _learn(self, statuses: Mapping[int, RankStatus]) -> None:
        failures = [status.failure for status in statuses.values() if status.failure is not None]
        if failures and self.failure is None:
            self.failure = min(failures, key=lambda failure: failure.when)
            self._news.set()

    def _open_poll(self) -> None:
        before = self._read_all()  # before the notification, or an answer could be taken for an old status
        self._write()
        self._store.notify()
        self._polling = self._now + self._grace_s, self._polls, before

    def _close_poll(self) -> None:
        assert self._polling is not None
        _, poll, before = self._polling
        self._polling = None
        statuses = self._read_all()
        self._learn(statuses)
        gone = [rank for rank, status in statuses.items() if rank in before and status.beat == before[rank].beat]
        if gone and self.failure is None:
            self._mercy_s = 0.0
            self._give_up({rank: statuses[rank] for rank in sorted(gone)})
            self._write_failure()
        self.statuses, self.answered = statuses, poll
        self._news.set()

    def _give_up(self, gone: Mapping[int, RankStatus]) -> None:
        watched = self._watched is not None and self._watched[0] in gone
        seconds = max(self._grace_s, self._now - self._since if watched else 0.0)
        shown = f"{round(seconds, 1) if seconds < 10 else round(seconds):g} s"
        message = f"did not answer for at least {shown}"
        each = [f"rank {rank} {message}{status.location('; it was last in ')}" for rank, status in gone.items()]
        ended = "Its process was" if len(gone) == 1 else "Their processes were"
        text = f"{'. '.join(each)}. {ended} killed or frozen, or the machine is gone: look at the end of its output."
        self.failure = self._to_publish = Failure(tuple(gone), message, text)

    def _watch_next(self) -> bool:
        """Read the status of the next rank that has one; return whether it is the same status as before."""
        found = next(((rank, status) for rank in self._others if (status := self._store.read(rank)) is not None), None)
        same = found == self._watched
        if not same:
            self._watched, self._since = found, self._now
        return same and found is not None

    def _act(self) -> None:
        with self._aborting:
            if self.failure is None or not self._aborts or self._leaving:
                return
            if self._due is None:
                self._due = self._now + self._mercy_s
            if self._now >= self._due:
                self._aborts = False
                self._abort()
                self._news.set()

    def _abort(self) -> None:
        abort(self._group)


def abort(group: dist.ProcessGroup) -> None:
    """Let every operation on ``group`` that is under way fail, on this rank at once; the group is unusable afterwards.

    Gloo's own ``abort`` and ``shutdown`` do nothing, and neither wakes a thread that waits in a collective. A receive
    that times out does: gloo then takes every connection of this rank's group for broken and closes it, so whatever
    waits on one, on this rank or at its other end, fails at once. In a ring not every two ranks are connected, so each
    rank has to call it. The group's control channels that are not polled fail too. Never raises; for any thread.
    Other backends get ``group.abort()``, which was not tried on an accelerator.
    """
    resources = resources_of(group)
    resources.aborted = True
    for backend in [*_backends(group), *resources.backends(polled=False)]:
        if _is_gloo(backend):
            _close_connections(backend)
        else:
            with contextlib.suppress(Exception):
                backend.abort()


def discard_channels(group: dist.ProcessGroup) -> None:
    """Let go of what joins keep for ``group``, after one has failed: its ranks may be anywhere in their exchanges."""
    resources = resources_of(group)
    for backend in resources.backends():
        _close_connections(backend)  # or a thread would wait in one for a rank that does not come
    resources.close()


def _close_connections(backend: Any) -> None:
    """Let a receive time out, from the first rank that is still connected.

    One over a connection that the other end has closed, as ranks do that abort a moment earlier, fails without touching
    the rest: a rank that waits for one that aborts nothing, since it is the one that failed, would go on waiting.
    """
    for distance in range(1, backend.size()):
        try:
            source = (backend.rank() + distance) % backend.size()
            backend.recv([torch.zeros(1)], source, _TAG).wait(timedelta(milliseconds=5))
        except Exception as error:
            if is_timeout(error):
                return


def was_aborted(group: dist.ProcessGroup) -> bool:
    """Whether :func:`abort` has ended this group on this rank."""
    return resources_of(group).aborted


def limit_operations(groups: Sequence[Any], timeout_s: float) -> Callable[[], None]:
    """Let operations on groups or backends that begin from now on fail after ``timeout_s`` seconds.

    Returns:
        What puts the former limits back; it never raises. A backend whose limit cannot be read is left alone.
    """
    former: list[tuple[Any, timedelta]] = []
    for backend in (backend for group in groups for backend in _backends(group)):
        with contextlib.suppress(Exception):
            limit = backend.options._timeout
            backend._set_default_timeout(timedelta(seconds=timeout_s))
            former.append((backend, limit))

    def restore() -> None:
        for backend, limit in former:
            with contextlib.suppress(Exception):
                backend._set_default_timeout(limit)

    return restore


def limit_of(group: dist.ProcessGroup) -> float:
    """How long an operation on ``group`` may take, in seconds; half an hour where its backends do not say."""
    limits = []
    for backend in _backends(group):
        with contextlib.suppress(Exception):
            limits.append(backend.options._timeout.total_seconds())
    return min(limits, default=_TORCHS_LIMIT_S)


def is_broken_operation(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if a collective or a call of the store has ended with it.

    Gloo raises a plain ``RuntimeError``, as so much else does; only its text tells them apart.
    """
    return any(isinstance(each, dist.DistError) or _matches(_BROKEN, each) for each in _chain(error))


def is_timeout(error: BaseException) -> bool:
    """Whether ``error``, or what it came from, looks as if an operation has waited too long for another rank."""
    return any(_matches(_TIMEOUT, each) for each in _chain(error))


def _matches(pattern: str, error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and re.search(pattern, str(error), re.IGNORECASE) is not None


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _backends(group: Any) -> list[Any]:
    """The backends of a group, each once, without what ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps around them."""
    if _is_gloo(group):
        return [group]
    found: dict[int, Any] = {}
    with contextlib.suppress(Exception):
        for device in group._device_types:
            with contextlib.suppress(Exception):
                backend: Any = group._get_backend(device)
                backend = getattr(backend, "wrapped_pg", backend)
                found[id(backend)] = backend
    return list(found.values())


def _is_gloo(backend: Any) -> bool:
    kind = getattr(dist, "ProcessGroupGloo", None)
    return kind is not None and isinstance(backend, kind)


def _store_gone(lost: str) -> PeerFailedError:
    how = f"it says {lost}" if lost else "it does not answer"
    return PeerFailedError(
        f"the job's store is gone ({how}), so it is not known which rank failed. The process that hosts it, rank 0 or "
        "the launcher, was killed or frozen, or its machine is gone: look at the end of its output first."
    )


def _summary(error: BaseException) -> str:
    """The type and message of an error, as the last lines of its traceback have them."""
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        text = type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
