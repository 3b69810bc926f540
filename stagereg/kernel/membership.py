"""Who still has data, step by step: the protocol of a join in which all ranks run stagereg's.

A step *begins* on a rank with data when its first joinable says so. A rank without data asks, once a step, whether it
has begun anywhere: if so, it takes part in that step, in whatever way; if not, nobody has data any more.

Two ways to know. *Counted*: every rank adds its presence into one asynchronous sum per step; a rank with data reads it
when it has to, late in its forward pass, and need not at all if nothing depends on it. Ranks that know how many batches
they have say with each step whether it is their last, so that a throw is known before it is due, and costs no waiting.
*Planned*: the lengths are known from the start, so there is nothing to sum; a rank with data only leaves a word in the
process group's store, which costs it a few microseconds and waits for nobody, and ranks without data look for that
word. A plan may be wrong: who leaves early, skips batches or goes on for longer is followed all the same, since the
word counts and not the plan.

It knows nothing of joinables, loaders or torch's wire (:mod:`stagereg.kernel.shadow`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagereg.errors import JoinError, UnevenInputsError
from stagereg.kernel.channel import ControlChannel, KeyValueStore, PendingSum, Waiting, wait_for_keys

__all__ = ["ActiveRanks", "AllReduceMembership", "Membership", "StoreMembership", "wait_until"]


@dataclass(frozen=True)
class ActiveRanks:
    """Who takes part in a step.

    Attributes:
        active: for each rank, whether it has data; empty where that is not known.
        syncing: how many of them will reduce their gradients. Where that is not known, 1 if they do and 0 if not.
    """

    active: tuple[bool, ...] = ()
    syncing: int = 1

    @property
    def known(self) -> bool:
        """Whether it says who is active."""
        return bool(self.active)

    @property
    def count(self) -> int:
        """The number of ranks with data; only where it is known."""
        return sum(self.active)

    @property
    def highest(self) -> int:
        """The last rank with data; only where it is known."""
        return max(rank for rank, active in enumerate(self.active) if active)


def wait_until(ready: Callable[[float], bool], what: str) -> None:
    """Wait for as long as it takes: a :data:`Waiting` that trusts its peers."""
    while not ready(60.0):
        pass


class Membership(ABC):
    """One rank's part in the protocol, for one loop over its data.

    Attributes:
        steps: how many steps have begun, here or for this rank while it had no data.
        shadowed: how many of them came since it ran out of data.
        over: whether no rank has data any more.
        even: whether all ranks are known to have as many batches.
        expected: whether the loop has given its body a batch of which no step has begun.
        empty: whether the loop's body runs on an empty batch.
    """

    even = False
    expected = False
    empty = False

    def __init__(self, rank: int, size: int, throw: bool, waiting: Waiting) -> None:
        self.steps = 0
        self.shadowed = 0
        self.over = False
        self._rank = rank
        self._size = size
        self._throw = throw
        self._waiting = waiting
        self._covered = False

    def begin(self, syncing: bool = True) -> None:
        """Rank with data: a step begins.

        Args:
            syncing: whether its gradients will be reduced among the ranks.
        """
        self.expected = False
        if self._covered:  # the body of a rank without data runs, in a step that others have begun
            self._covered = False
            return
        if self.empty:  # ... and takes another step on the same empty batch, as the others do on theirs
            self.wait_for_next_step()
            return
        self._begin(syncing)
        self.steps += 1

    def check(self) -> None:  # noqa: B027 (most have nothing against it)
        """Any joinable but the first, in place of :meth:`begin`. Raises: ``JoinError`` if it must not be used now."""

    def expect_empty_step(self) -> None:
        """Rank without data: its loop body is about to run all the same, and its next :meth:`begin` is no news."""
        self._covered = self.expected = True

    @property
    def expects_empty_step(self) -> bool:
        """Whether such a body has not begun its step yet."""
        return self._covered

    @abstractmethod
    def read(self) -> ActiveRanks:
        """Who takes part in the step that has begun; waits for the other ranks to begin it or to run out of data.

        Raises:
            UnevenInputsError: the join is to throw, and some rank has run out of data.
        """

    def raise_if_exhausted(self) -> None:  # noqa: B027 (a plan has been heeded before the first step)
        """Rank with data, in a join that throws, after :meth:`begin` and before the step changes anything.

        Waits for the other ranks only if some of them did not know whether they would take this step.

        Raises:
            UnevenInputsError: some rank has run out of data.
        """

    def wait_for_next_step(self) -> ActiveRanks | None:
        """Rank without data, once a step: wait until the step has begun on some rank.

        Returns:
            Who takes part in it; ``None`` once no rank has data any more.

        Raises:
            UnevenInputsError: the join is to throw, and other ranks still have data.
        """
        self._covered = False
        if self.over:
            return None
        roll = self._wait_for_next_step()
        if roll is None:
            self.over = True
            return None
        self.steps += 1
        self.shadowed += 1
        return roll

    def _ran_out(self) -> UnevenInputsError:
        return UnevenInputsError(
            f"Rank {self._rank} exhausted all inputs after {self.steps} steps, while others have more.", self._rank
        )

    @abstractmethod
    def _begin(self, syncing: bool) -> None: ...

    @abstractmethod
    def _wait_for_next_step(self) -> ActiveRanks | None: ...


_ABSENT, _UNSURE, _MORE, _LAST = 0.0, 1.0, 2.0, 3.0
"""What a rank adds in its place: no data, a step, a step with another to come, the last step."""


class AllReduceMembership(Membership):
    """One asynchronous sum a step.

    Args:
        channel: on which the ranks sum.
        throw: whether a rank's running out of data is an error on all ranks.
        waiting: how to wait.
        length: how many steps this rank expects to begin, if it knows. A rank that runs out before is thrown for one
            step later, which it still takes part in.
    """

    def __init__(
        self, channel: ControlChannel, throw: bool = False, waiting: Waiting = wait_until, length: int | None = None
    ) -> None:
        super().__init__(channel.rank, channel.size, throw, waiting)
        self._channel = channel
        self._length = length
        self._pending: PendingSum | None = None
        self._values = [_UNSURE] * channel.size + [float(channel.size)]
        self._roll = ActiveRanks((True,) * channel.size, channel.size)
        self._number = 0
        self._sure = False  # whether the step that has begun is one that all ranks had said they would take

    def read(self) -> ActiveRanks:
        """See :meth:`Membership.read`."""
        roll = self._read()
        if self._throw and not self._sure:
            self._stop_if_absent(self.steps - 1)
        return roll

    def raise_if_exhausted(self) -> None:
        """See :meth:`Membership.raise_if_exhausted`."""
        if not self._sure:
            self.read()

    def _read(self) -> ActiveRanks:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._waiting(pending.ready, "the next step")
            values = pending.wait()
            if values == self._values:
                return self._roll
            self._values = values
            *active, syncing = values
            self._roll = ActiveRanks(tuple(value > 0 for value in active), int(syncing))
            if self._roll.syncing not in (0, self._roll.count):
                raise JoinError(
                    f"in step {self._number}, {self._roll.syncing} of {self._roll.count} ranks reduce their gradients "
                    "and the others do not (no_sync). Decide by the number of the step, which all ranks have alike, "
                    "and not by what is left of a rank's own data."
                )
        return self._roll

    def _begin(self, syncing: bool) -> None:
        self._look_back()
        presence = _UNSURE if self._length is None else _MORE if self.steps + 1 < self._length else _LAST
        self._add(presence, syncing)

    def _wait_for_next_step(self) -> ActiveRanks | None:
        self._look_back()
        self._add(_ABSENT, False)
        roll = self._read()
        if not roll.count:
            return None
        if self._throw and not self._sure:
            raise self._ran_out()
        return roll

    def _add(self, presence: float, syncing: bool) -> None:
        values = [0.0] * (self._size + 1)
        values[self._rank] = presence
        values[-1] = float(syncing)
        self._number = self.steps + 1
        self._pending = self._channel.add(values)

    def _look_back(self) -> None:
        """Read the sum of the step before, which has long arrived, and stop where it says that this one is uneven."""
        self._read()
        if not self._throw:
            return
        self._stop_if_absent(self.steps)
        presences = self._values[:-1]
        last = [rank for rank, presence in enumerate(presences) if presence == _LAST]
        if last and _MORE in presences:  # who does not know may come to its end in the same step
            raise self._stop(last, self.steps)
        self._sure = all(presence == _MORE for presence in presences)

    def _stop_if_absent(self, taken: int) -> None:
        if self._roll.count < self._size:
            raise self._stop([rank for rank, active in enumerate(self._roll.active) if not active], taken)

    def _stop(self, gone: Sequence[int], taken: int) -> UnevenInputsError:
        if self._rank in gone:
            return self._ran_out()
        ranks = ", ".join(map(str, gone))
        return UnevenInputsError(f"Rank {ranks} exhausted all inputs, so all ranks stop after step {taken}.")


_SYNCING, _OVER = b"1", b"over"


class StoreMembership(Membership):
    """No collective at all.

    Args:
        rank: this rank.
        lengths: how many batches each rank announced.
        words: where the ranks leave word, with keys that nothing else uses.
        throw: whether uneven lengths are an error on all ranks, before the first step.
        waiting: how to wait.

    Raises:
        UnevenInputsError: on all ranks, if it is to throw and the lengths differ.
    """

    def __init__(
        self,
        rank: int,
        lengths: Sequence[int],
        words: KeyValueStore,
        throw: bool = False,
        waiting: Waiting = wait_until,
    ) -> None:
        super().__init__(rank, len(lengths), throw, waiting)
        self._words = words
        self._left = False
        self._roll = ActiveRanks()
        self.even = len(set(lengths)) == 1
        if throw and not self.even:
            told = ", ".join(f"rank {rank} has {length}" for rank, length in enumerate(lengths))
            shortest = min(lengths)
            raise UnevenInputsError(
                f"The inputs are uneven, so no step was taken: {told} batches.", lengths.index(shortest)
            )

    def read(self) -> ActiveRanks:
        """See :meth:`Membership.read`; never waits, and does not know who is active."""
        return self._roll

    def _begin(self, syncing: bool) -> None:
        self._roll = ActiveRanks(syncing=int(syncing))
        self._words.set(f"begun/{self.steps}", "1" if syncing else "0")

    def _wait_for_next_step(self) -> ActiveRanks | None:
        if not self._left:
            self._left = True
            self._leave()
        key = f"begun/{self.steps}"
        self._waiting(lambda seconds: wait_for_keys(self._words, key, seconds), "the next step")
        word = self._words.get(key)
        self._roll = ActiveRanks(syncing=int(word == _SYNCING))
        if word == _OVER:
            return None
        if self._throw:
            raise self._ran_out()
        return self._roll

    def _leave(self) -> None:
        """Tell how many steps this rank has taken; who is last to do so knows what all ranks come to wait for."""
        self._words.set(f"taken/{self._rank}", str(self.steps))
        if self._words.add("left", 1) == self._size:
            taken = max(int(self._words.get(f"taken/{rank}")) for rank in range(self._size))
            self._words.set(f"begun/{taken}", "over")
