"""Membership: which ranks still have data in each step of a join, if all ranks run stagereg's ``Join``.

A step *begins* on a rank with data when its first joinable announces the step. A rank without data checks, once per
step, whether the step has begun on any rank. If it has, the rank takes part in the step; if not, no rank has data any
more. There are two protocols:

* :class:`AllReduceMembership` (mode ``counted``): in each step, every rank adds to an asynchronous sum whether it has
  data. A rank with data reads the sum late in its forward, or never if nothing depends on it. A rank that knows
  the length of its loader also adds whether another step will follow. So a join that throws early waits for sums only
  near the end.
* :class:`StoreMembership` (mode ``planned``): steps have no sum. A rank with data writes one key per step to the
  rendezvous store, which takes microseconds; ranks without data poll for the key. Ranks rely on the keys, so incorrect
  loader lengths do no harm.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from stagereg.errors import JoinError, UnevenInputsError
from stagereg.kernel.channel import ControlChannel, PendingSum, Waiting


class ActiveRanks(NamedTuple):
    """The ranks that take part in a step."""

    ranks: tuple[int, ...] = ()  # the ranks with data, sorted; empty if unknown
    syncing: int = 1  # number of ranks that will reduce gradients; if unknown: 1 if some rank may, otherwise 0


class Membership(ABC):
    """One rank's endpoint of the protocol, for one loop over data.

    Attributes:
        steps: the number of steps that have begun, including those that began while this rank had no data.
        shadowed: the number of steps that have begun since this rank ran out of data.
        over: whether no rank has data any more.
        all_took_every_step: after the loop, whether every rank had data in every step. Equal on all ranks.
        empty: whether the loop body runs on an empty batch.
        expects_empty_step: whether the body has received an empty batch and has not begun a step on it.
    """

    all_took_every_step = True
    empty = False
    expects_empty_step = False
    _sure = True  # whether all ranks announced in the previous step that they would take this step

    def __init__(self, channel: ControlChannel, throw: bool, waiting: Waiting) -> None:
        self.steps = 0
        self.shadowed = 0
        self.over = False
        self._channel = channel
        self._rank, self._size = channel.rank, channel.size
        self._throw = throw
        self._waiting = waiting

    def begin(self, syncing: bool | None = True) -> None:
        """Begin a step on a rank with data, or on an empty batch.

        ``syncing``: whether the step reduces gradients. ``None``: as on the other ranks.
        """
        if self.expects_empty_step:  # a step on an empty batch, which other ranks have already begun
            self.expects_empty_step = False
        elif self.empty:  # a second step on the same empty batch, as on the batches of other ranks
            self.wait_for_next_step()
        else:
            self._begin(syncing)
            self.steps += 1

    @abstractmethod
    def some_never_had_data(self) -> bool:
        """Return whether some rank has no data in the first step. Waits for the other ranks. Thread-safe."""

    @abstractmethod
    def read(self) -> ActiveRanks:
        """Return the ranks that take part in the current step. Waits until each rank has begun it or is out of data."""

    def raise_if_exhausted(self) -> None:
        """Raise on a rank with data, before a step changes anything, if the join throws and a rank ran out of data.

        Waits for the other ranks only if some rank did not announce that it would take this step.
        """
        if not self._sure:
            self.read()

    def wait_for_next_step(self) -> ActiveRanks | None:
        """On a rank without data, wait for the next step. Return its active ranks, or ``None`` if no rank has data."""
        self.expects_empty_step = False
        found = None if self.over else self._wait_for_next_step()
        if found is None:
            self.over = True
        else:
            self.steps += 1
            self.shadowed += 1
        return found

    def _ran_out(self) -> UnevenInputsError:
        rank = self._channel.ranks[self._rank]
        text = f"Rank {rank} exhausted all inputs after {self.steps} steps, but other ranks have more."
        return UnevenInputsError(text, rank)

    @abstractmethod
    def _begin(self, syncing: bool | None) -> None: ...

    @abstractmethod
    def _wait_for_next_step(self) -> ActiveRanks | None: ...


_ABSENT, _UNSURE, _MORE = 0.0, 1.0, 2.0
"""What a rank adds to the sum: it has no data; it takes this step; it takes this step and another step follows."""
BY_NUMBER = (
    "Choose no_sync() by the number of the step, which is equal on all ranks, not by a rank's remaining data or by "
    "a counter that stops on ranks that have left the loop."
)
_PERHAPS = 2.0**-20  # added to the sum by a rank that does not yet know whether it will reduce gradients


class AllReduceMembership(Membership):
    """Adds up in each step, in an asynchronous all-reduce, which ranks have data.

    ``length``: the number of batches of this rank, if known. If its data ends earlier, this rank takes part in one more
    step, after which all ranks raise.
    """

    def __init__(self, channel: ControlChannel, throw: bool, waiting: Waiting, length: int | None) -> None:
        super().__init__(channel, throw, waiting)
        self._length = length
        self._pending: PendingSum | None = None
        self._first: PendingSum | None = None  # the first sum of the loop
        self._values = [_UNSURE] * channel.size + [float(channel.size)]
        self._active = ActiveRanks(tuple(range(channel.size)), channel.size)
        self._number = 0  # the number of the step whose sum is pending
        self._sure = False

    def some_never_had_data(self) -> bool:
        return self._first is not None and _ABSENT in self._first.wait()[:-1]

    def read(self) -> ActiveRanks:
        active = self._read()
        if self._throw and not self._sure:
            self._stop(begun=1)
        return active

    def _read(self) -> ActiveRanks:
        if self._pending is None:
            return self._active
        pending, self._pending = self._pending, None
        self._waiting(pending.ready, "the next step")
        values = pending.wait()
        if values != self._values:
            self._values = values
            ranks = tuple(rank for rank, presence in enumerate(values[:-1]) if presence != _ABSENT)
            sure, perhaps = int(values[-1]), round(values[-1] % 1 / _PERHAPS)
            self._active = ActiveRanks(ranks, sure + perhaps * (sure > 0 or perhaps == len(ranks)))
            if 0 < len(ranks) < self._size:
                self.all_took_every_step = False
            if (syncing := self._active.syncing) not in (0, len(ranks)):
                raise JoinError(
                    f"in step {self._number}, {syncing} of {len(ranks)} ranks reduce their gradients but the others do"
                    f" not (no_sync). {BY_NUMBER}"
                )
        return self._active

    def _begin(self, syncing: bool | None) -> None:
        self._look_back()
        has_more = self._length is not None and self.steps + 1 < self._length  # each batch takes at least one step
        self._add(_MORE if has_more else _UNSURE, syncing)

    def _wait_for_next_step(self) -> ActiveRanks | None:
        self._look_back()
        self._add(_ABSENT, False)
        active = self.read()
        return active if active.ranks else None

    def _add(self, presence: float, syncing: bool | None) -> None:
        values = [0.0] * self._size + [_PERHAPS if syncing is None else float(syncing)]
        values[self._rank] = presence
        self._number = self.steps + 1
        self._pending = self._channel.add(values)
        self._first = self._first or self._pending

    def _look_back(self) -> None:
        """Read the sum of the previous step, which has arrived long ago. Raise if it shows ranks without data."""
        self._read()
        if not self._throw:
            return
        self._stop()
        self._sure = all(presence == _MORE for presence in self._values[:-1])

    def _stop(self, begun: int = 0) -> None:
        """Raise if only some ranks had data in the last sum. ``begun``: number of counted steps that will not run."""
        gone = [rank for rank, each in enumerate(self._values[:-1]) if each == _ABSENT]
        if len(gone) == self._size:
            return
        if self._rank in gone:
            raise self._ran_out()
        if gone:
            ranks = ", ".join(str(self._channel.ranks[rank]) for rank in gone)
            self.steps -= begun
            raise UnevenInputsError(f"Rank {ranks} exhausted all inputs, so all ranks stop after step {self.steps}.")


class StoreMembership(Membership):
    """Writes one store key per step. The ranks add up their step counts once, when they leave the loop.

    The channel must have no other sum at that time. ``lengths``: the number of batches of each rank. If the lengths
    differ and the join throws, all ranks raise. The key ``begun/<step>`` is 1 if the step reduces gradients, otherwise
    0.
    """

    def __init__(
        self, channel: ControlChannel, lengths: Sequence[int], store: Store, throw: bool, wait: Waiting
    ) -> None:
        super().__init__(channel, throw, wait)
        self.store = store
        self._taken: PendingSum | None = None
        self._active = ActiveRanks()
        self._skipped = False  # whether this rank's last step did not reduce gradients
        self.shortest, self._longest = min(lengths), max(lengths)
        if throw and self.shortest < self._longest:
            each = ", ".join(f"rank {rank} has {length}" for rank, length in zip(channel.ranks, lengths, strict=True))
            text = f"The inputs are uneven, so no step was taken: {each} batches."
            raise UnevenInputsError(text, channel.ranks[lengths.index(self.shortest)])

    def some_never_had_data(self) -> bool:
        """Return whether the loader of some rank has length 0. Does not wait."""
        return self.shortest == 0

    def read(self) -> ActiveRanks:
        """Return immediately, with empty ``ranks``: in this mode, the active ranks are unknown."""
        return self._active

    @property
    def keys(self) -> Iterator[str]:
        """The keys of the loop in the rendezvous store that this rank must delete."""
        return (f"begun/{step}" for step in range(self._rank, self.steps, self._size))

    def _begin(self, syncing: bool | None) -> None:
        self._active = ActiveRanks(syncing=int(syncing is not False))
        key, value = f"begun/{self.steps}", "0" if syncing is False else "1"
        self._channel.skips_reductions |= syncing is False
        if not self._channel.skips_reductions or syncing is None:
            self.store.set(key, value)
            self._skipped = False
            return
        # A rank that has never skipped a reduction may overwrite this rank's value, so check the previous value.
        before = self.steps and self._skipped and self.store.get(f"begun/{self.steps - 1}") != b"0"
        if before or self.store.compare_set(key, "", value).decode() != value:
            reduces = syncing and not before
            raise JoinError(
                f"in step {self.steps + (not before)}, this rank {'reduces' if reduces else 'does not reduce'} its "
                f"gradients, but another rank {'does not' if reduces else 'does'} (no_sync). {BY_NUMBER}"
            )
        self._skipped = value == "0"

    def _wait_for_next_step(self) -> ActiveRanks | None:
        if self._taken is None:
            taken = [0.0] * self._size
            taken[self._rank] = self.steps
            self._taken = self._channel.add(taken)
        self._waiting(self._next_is_known, "the next step")
        if self.over:
            return None
        if self._throw:
            raise self._ran_out()
        self._active = ActiveRanks(syncing=int(self.store.get(f"begun/{self.steps}")))
        return self._active

    def _next_is_known(self, seconds: float) -> bool:
        """Wait for at most ``seconds``. Return whether the next step has begun, or all ranks have left the loop."""
        assert self._taken is not None
        started, waited = time.monotonic(), 0.0
        # After the longest planned length, the sum probably arrives soon, and is faster to check than the store.
        ended = self.steps >= self._longest and self._taken.ready(min(seconds, 0.002))
        while not ended and not self.store.check([f"begun/{self.steps}"]):
            ended = self._taken.ready(min(waited / 8, 0.002))  # increasing poll intervals
            waited = time.monotonic() - started
            if waited > seconds and not ended:
                return False
        if ended:
            taken = self._taken.wait()
            self.over = max(taken) == self.steps  # no rank has begun the next step
            self.all_took_every_step = min(taken) == max(taken)
        return True
