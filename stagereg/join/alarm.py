"""When one rank of a join fails, every other rank ends soon, with an error that says who it was and why.

Without it a rank whose partner has raised, died, frozen or got stuck waits in its collective for as long as the process
group is patient, half an hour by default, and then learns nothing. A :class:`FailureDetector` per rank and
join sees to it:

* a rank that raises tells the others its error; they know within about a quarter of a second;
* a rank that is killed or frozen falls silent: found in seconds where its peers' collectives break, as gloo's do when a
  process is gone, and within the timeout where nothing breaks;
* a rank that is alive but does not come lets the others' collectives run out after the timeout instead of the process
  group's; then they ask around, for two seconds at most, and name it and the step that it was last in.

Who knows of a failure aborts its own process group, so a program that sits in a collective, also one inside DDP's
backward, comes back at once with an error of the backend, and :meth:`FailureDetector.explain` then turns that into one
that says why. A group that was aborted is unusable: end the program, or make a new group.

``watch`` is the thread that talks to the other ranks, on the ``board``; ``abort`` ends operations on a group. When to
report and what to raise is left to the join.
"""

from __future__ import annotations

import atexit
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from stagereg.errors import PeerFailedError, StageregError
from stagereg.join.abort import abort, is_broken_operation, is_timeout, limit_operations
from stagereg.join.board import Failure, RankStatus, location
from stagereg.join.watch import HeartbeatThread

__all__ = ["FailureDetector"]

_LEAVE_S = 1.0
"""Seconds that the thread gets for its last word; it needs them only if the store does not answer."""
_HEARSAY_S = 1.0
"""Seconds that the finding of another rank may take to get here once this rank's own inquiry is over."""
_TURN_S = 0.2
_IN_COLLECTIVE = "a collective that did not finish"
_LONGEST = 1000
"""Characters of a rank's error that the others print."""


class FailureDetector:
    """A rank's tie to the other ranks of a join. Make, start and stop one per join and rank; it is used once.

    All methods are for the thread that runs the training loop. None of them is a collective, so ranks without a
    detector may be in the group, and are never suspected of having failed.

    Args:
        group: whose ranks take part.
        timeout_s: seconds that a rank may keep the others waiting.
        name: the same on all ranks, and of no other join of the job.
        also: further groups of these ranks that the join waits on, such as its side lines'.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_s: float, name: str, also: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        self._groups = [group, *also]
        self._timeout_s = timeout_s
        self._name = name
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = self._ranks[group.rank()]
        self._watch: HeartbeatThread | None = None
        self._restore: list[Callable[[], None]] = []
        self._notes: dict[str, object] = {}
        self._reported = False

    def start(self) -> None:
        """Begin to say that this rank is alive, and to listen; operations on the groups may last ``timeout_s`` now.

        It waits for nobody. In a group of one rank it does nothing.
        """
        if len(self._ranks) == 1 or self._watch is not None:
            return
        self._restore = [limit_operations(group, self._timeout_s) for group in self._groups]
        self._watch = HeartbeatThread(
            self._groups[0], self._name, self._rank, self._ranks, self._timeout_s, self._abort
        )
        self._watch.notes = self._notes
        self._watch.start()
        _running.add(self)

    def stop(self) -> None:
        """Say goodbye and put the groups' limits back; from now on this rank is not missed. Twice is harmless."""
        watch, self._watch = self._watch, None
        restore, self._restore = self._restore, []
        if watch is not None:
            watch.leave(_LEAVE_S)
            _running.discard(self)
        for each in restore:
            each()

    def note(self, **progress: object) -> None:
        """Keep where this rank is, such as ``step=5`` or ``where="exit"``, for the messages of others; costs nothing.

        What was noted under another name stays. The others hear of it every few seconds, and when they ask.
        """
        self._notes = {**self._notes, **progress}
        if self._watch is not None:
            self._watch.notes = self._notes

    def check(self) -> None:
        """Return at once while no failure is known here.

        Raises:
            PeerFailedError: a rank has failed.
        """
        if (error := self._known()) is not None:
            raise error

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one leaves with ``error``. Never raises, never hangs.

        They abort their groups if they do not leave by themselves within a second, as they do where all ranks raise the
        same on purpose and go on.

        A :class:`PeerFailedError`, and any error once a failure is known, is a consequence and not told. Let
        :meth:`explain` see the error of a collective first: it may be a consequence of what is not known here yet.
        """
        if self._watch is None or isinstance(error, PeerFailedError):
            return
        self._reported = True
        said = _summary(error)
        text = f"rank {self._rank} failed: {said}\nThe cause is there: read the output of rank {self._rank}."
        self._watch.leaves_with(Failure((self._rank,), said, text), _LEAVE_S)

    def explain(self, error: BaseException) -> PeerFailedError | None:
        """Find out why a collective has failed here with ``error``; takes about three seconds, and four at most.

        Returns:
            What to raise from ``error``; ``None`` if it does not look like a collective's, which is told at once, or if
            all ranks are well and none knows a reason. It then stands alone.
        """
        watch = self._watch
        if watch is None or not is_broken_operation(error):
            return None
        watch.waits = _IN_COLLECTIVE
        call = watch.poll_all() if watch.failure is None else 0
        ran_out = is_timeout(error)
        watch.await_news(lambda: ran_out and watch.roll.call >= call, watch.grace_s + _HEARSAY_S)
        watch.await_news(lambda: watch.roll.call >= call, _HEARSAY_S)
        watch.waits = ""
        known = self._known()
        if known is None and watch.roll.call < call:
            known = self._without_store(watch.lost)
        elif known is None and ran_out:
            known = self._conclude(self._late("the collective that this rank was in", watch.roll.words))
        return known

    def wait(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait until ``ready``, and no longer than ``timeout_s``.

        Args:
            ready: waits for as many seconds as it is given at most, and returns whether what is waited for is there.
            what: that, for the message.

        Raises:
            PeerFailedError: a rank has failed, or some did not come. What ``ready`` raises is explained if it can be.
        """
        watch = self._watch
        start = time.monotonic()
        call = 0
        if watch is not None:
            watch.waits = what
        try:
            while not self._ready(ready):
                self.check()
                waited = time.monotonic() - start
                if watch is not None and not call and waited > self._timeout_s - watch.grace_s - _TURN_S:
                    call = watch.poll_all()  # so that the answers are there when the time is over
                if waited > self._timeout_s:
                    break
            else:
                return
        finally:
            if watch is not None:
                watch.waits = ""
        if watch is None:
            raise PeerFailedError(f"the other ranks did not come to {what} within {self._timeout_s:g} s.")
        watch.await_news(lambda: watch.roll.call >= call, _HEARSAY_S)
        self.check()
        if watch.roll.call < call:
            raise self._without_store(watch.lost)
        raise self._conclude(self._late(what, watch.roll.words))

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
        if self._watch is None or (failure := self._watch.failure) is None:
            return None
        text = failure.text
        if self._rank in failure.ranks and not self._reported:
            text = f"the other ranks have given this one up, and went on without it: {text}"
        return PeerFailedError(text, next(iter(failure.ranks), None), failure.message)

    def _conclude(self, failure: Failure) -> PeerFailedError:
        """Take what was found here for the failure, tell it, and return what to raise."""
        assert self._watch is not None
        self._watch.tell(failure, _LEAVE_S)
        known = self._known()
        assert known is not None
        return known

    def _late(self, what: str, words: Mapping[int, RankStatus]) -> Failure:
        """Who kept the others waiting, by what the ranks have just said: who answered is alive."""
        late = {rank: word for rank, word in sorted(words.items()) if not word.waits}
        absent = [rank for rank in self._ranks if rank != self._rank and rank not in words]
        if late:
            ranks = tuple(late)
            message = f"alive, but did not come to {what} within {self._timeout_s:g} s"
            each = [f"rank {rank} is {message}{location(word, '; it was last in ')}" for rank, word in late.items()]
            advice = "Raise join.timeout if that is how long a step takes."
        elif absent:
            ranks = tuple(absent)
            message = f"not in this join, or no more, and did not come to {what} within {self._timeout_s:g} s"
            each = [f"rank {rank} is {message}" for rank in absent]
            advice = "All ranks have to enter the same joins in the same order, and none may leave by itself."
        else:
            ranks = ()
            message = f"all ranks are alive and wait for each other, this one for {what}"
            others = (f"rank {rank} for {word.waits}{location(word, ', in ')}" for rank, word in sorted(words.items()))
            each = [", ".join([message, *others])]
            advice = "They do not make the same calls in the same order."
        return Failure(ranks, message, f"{'. '.join(each)}. {advice}")

    def _without_store(self, lost: str) -> PeerFailedError:
        how = f"it says {lost}" if lost else "it does not answer"
        message = f"the job's store is gone ({how}), so nobody can say which rank failed"
        return PeerFailedError(
            f"{message}. The process that hosts it, rank 0 or the launcher, was killed or frozen, or its machine is "
            "gone: look at the end of its output first."
        )

    def _abort(self) -> None:
        for group in self._groups:
            abort(group)


_running: weakref.WeakSet[FailureDetector] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is in a call of the store when the interpreter goes down would take the process with it."""
    for detector in list(_running):
        detector.stop()


def _summary(error: BaseException) -> str:
    """The type and message of an error, as the last lines of its traceback have them."""
    try:
        said = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        said = type(error).__name__
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
