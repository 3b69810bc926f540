"""One join on one rank, from entering to leaving: its ranks, its steps, and for each loop who still has data.

A joinable gets the session by ``attach``. The session knows process groups, loaders' lengths and the modes of a join;
it does not know what a joinable or a hook does in a step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from stagereg.errors import JoinError, nearest
from stagereg.join.failure import FailureDetector
from stagereg.join.responder import Responder
from stagereg.kernel.channel import ControlChannel, PendingSum, control_channel, resources_of
from stagereg.kernel.membership import AllReduceMembership, Membership, StoreMembership

__all__ = ["JoinSession", "Mode", "one_of"]

Mode = Literal["planned", "counted", "torch", "auto"]


def one_of(what: str, name: str, choices: Any) -> str:
    """Return ``name``. Raises: ``JoinError`` with the nearest name if it is none of a ``Literal``'s."""
    names: Sequence[str] = get_args(choices)
    if name not in names:
        raise JoinError(f"there is no {what} {name!r}.{nearest(str(name), names)} One of: {', '.join(names)}")
    return name


class JoinSession:
    """All ranks construct theirs in the same order.

    Args:
        group: the ranks.
        joinables: what takes part, in order.
        mode: as the user chose it.
        throw: whether uneven inputs are an error.
        needs_active_ranks: whether a step depends on who is active, so that planned lengths are not enough.
        foreign: the type of a first joinable that announces through torch's ``Join``, and whose steps on torch's wire
            are not counted; empty if it announces here.
        timeout_s: seconds after which a rank that does not come is an error.

    Attributes:
        joinables: what takes part, in order.
        announced: how many steps the first joinable has announced on torch's wire.
        followed: how many steps of torch's wire this rank has taken part in without data.
        loops: how many loops have asked who has data.
        detector: finds and reports failures of ranks.
        store: of this join alone; ``None`` if there is one rank.
        responder: sums for :meth:`stagereg.Join.mean`; ``None`` on torch's wire.
        refusal: what all ranks raise if the lengths that they have exchanged are not to be planned with.
        awaits_step: whether a loop has given its body a batch of which no step has begun.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        joinables: Sequence[Any],
        mode: str | None,
        throw: bool,
        needs_active_ranks: bool,
        foreign: str,
        timeout_s: float,
    ) -> None:
        name = resources_of(group).next_name("join")
        self.joinables = joinables
        self.announced = 0
        self.followed = 0
        self.loops = 0
        self.detector = FailureDetector(group, timeout_s, name, self._current_step)
        self.store = PrefixStore(name, group.get_group_store()) if group.size() > 1 else None
        self.responder: Responder | None = None
        self.refusal: JoinError | None = None
        self.awaits_step = False
        self._group = group
        self._mode = mode
        self._throw = throw
        self._needs_active_ranks = needs_active_ranks
        self._foreign = foreign
        self._memberships: list[Membership] = []
        self._plain: Callable[[], Membership | None] = lambda: None
        self._loop: Callable[[], Membership] | None = None
        self._suspended: Membership | None = None

    @property
    def membership(self) -> Membership | None:
        """How this rank knows who has data in the loop that runs; ``None`` where it goes over torch's wire."""
        return self._suspended or (self._loop or self._plain)()

    @property
    def plain(self) -> Membership | None:
        """The same for a loop that ranks leave when they run out of data; waits for their lengths the first time."""
        return self._plain()

    @property
    def all_took_every_step(self) -> bool:
        """Once no rank has data any more: whether all are known to have had data in every step; the same on all."""
        known = self.plain is not None  # on torch's wire others may have taken steps in a plain loop
        return known and all(each.over and each.all_took_every_step for each in self._memberships)

    @property
    def steps(self) -> int:
        """How many steps have begun in all loops so far, on this rank or on others while it had no data."""
        return self.announced + self.followed + sum(membership.steps for membership in self._memberships)

    @property
    def shadowed(self) -> int:
        """How many of them came while this rank had no data."""
        return self.followed + sum(membership.shadowed for membership in self._memberships)

    def model_before(self, joinable: Any) -> Any:
        """Return the nearest joinable before ``joinable`` that reduces the gradients of a model, or ``None``."""
        found = None
        for each in self.joinables:
            if each is joinable:
                break
            found = each if each.reduces_gradients else found
        return found

    @property
    def counts_steps(self) -> bool:
        """Whether :attr:`steps` includes this rank's own; those of a joinable of torch's are announced elsewhere."""
        return not self._foreign

    def start(self, loader: Any) -> None:
        """Enter; the join around this one must not be used from now on. Collective.

        Args:
            loader: that of a loop that ranks leave when they run out of data, if it is known. The ranks exchange its
                length now. A join that throws waits for the others' lengths here, any other in its first step.
        """
        if _entered.sessions:
            _entered.sessions[-1]._suspended = _Unusable(_SUSPENDED)
        _entered.sessions.append(self)
        self.detector.start()
        self._plain = self._membership_of_plain_loop(loader)

    def stop(self) -> None:
        """Leave, whatever has happened; the join around this one goes on."""
        if self in _entered.sessions:
            _entered.sessions.remove(self)
            if _entered.sessions:
                _entered.sessions[-1]._suspended = None
        self.detector.stop()
        if self.store is not None:
            self._delete_keys(self.store)

    def _delete_keys(self, store: Any) -> None:
        """Delete the keys of the join before, if all ranks are past it, and leave this join's to the next one."""
        resources = resources_of(self._group)
        if any(membership.over for membership in self._memberships):
            channel = control_channel(self._group, "membership", self._wait_for_ranks)
            for delete in resources.expired:
                channel.thread.submit(delete)
            resources.expired = []
        for membership in self._memberships:
            if isinstance(membership, StoreMembership):
                resources.expired.append(functools.partial(_delete, membership.store, membership.keys))
        if self.loops and self._group.rank() == 0:
            examples = [f"example/{number}" for number in range(self.loops + 1)]
            resources.expired.append(functools.partial(_delete, store, examples))

    def start_loop(self, loader: Any) -> Callable[[], Membership]:
        """Enter a loop whose body runs on all ranks; returns what says who has data in it. Collective.

        A join that does not throw waits for the other ranks' lengths when that is called for the first time.
        """
        if self._foreign:
            raise JoinError(
                f"join.iterate needs a first joinable that announces through stagereg's Join, but {self._foreign} "
                "does so through torch's. Put the model first."
            )
        _ = self.plain  # its lengths were exchanged first
        self._loop = self._membership_of_loop(loader)
        return self._loop

    def end_loop(self) -> None:
        """The loop has ended on all ranks."""
        self._loop = None

    def begin(self, reduces: bool) -> Membership | None:
        """A step begins on this rank: announce it; on torch's wire only count it.

        Args:
            reduces: whether its gradients will be reduced among the ranks.

        Returns:
            As :attr:`membership`.
        """
        self.awaits_step = False
        membership = self.membership
        if membership is None:
            self.announced += 1
        else:
            membership.begin(reduces)
        return membership

    def answer(self) -> None:
        """This rank has no data in the step that has begun: answer other ranks' :meth:`stagereg.Join.mean` by zeros."""
        if self.responder is not None:
            self.responder.start()

    def end_answers(self, loop: Membership | None = None) -> None:
        """The loop has ended; returns when it has on all ranks.

        Args:
            loop: the loop, if it is over. Where all ranks took all of its steps, none answers, and nothing is to end.
        """
        if self.responder is not None and not (loop is not None and loop.all_took_every_step):
            self.responder.close()

    def _membership_of_plain_loop(self, loader: Any) -> Callable[[], Membership | None]:
        if self._mode == "torch" or (self._mode is None and loader is None):
            return lambda: None
        if self._foreign:
            if self._mode in (None, "auto"):
                return lambda: None
            raise JoinError(
                f"join.mode={self._mode} needs a first joinable that announces through stagereg's Join, but "
                f"{self._foreign} does so through torch's. Put a DDP module first, or use join.mode=torch."
            )
        if loader is None and self._mode == "planned":
            return functools.cache(lambda: _Unusable(_NO_PLAN))
        return self._membership_of_loop(loader)

    def _membership_of_loop(self, loader: Any) -> Callable[[], Membership]:
        """Enter a loop and send its length, if it is used; returns what waits for the lengths of the other ranks."""
        if self.responder is None:
            self.responder = Responder(
                control_channel(self._group, "mean", self._wait_for_ranks), 2, self.detector.wait
            )
        channel = control_channel(self._group, "membership", self._wait_for_ranks)
        length, number = _length_of(loader), self.loops
        lengths: PendingSum | None = None
        if self._mode != "counted" and (loader is not None or self._mode == "planned"):
            ranks = range(channel.size)
            lengths = channel.add([0.0 if rank != channel.rank or length is None else length + 1.0 for rank in ranks])
        self.loops += 1

        @functools.cache
        def decided() -> Membership:
            planned = None if lengths is None else self._planned(channel, lengths, number)
            membership = planned
            if membership is None or self._needs_active_ranks:
                membership = AllReduceMembership(channel, self._throw, self.detector.wait, length)
                membership.even = planned is not None and planned.even
            self._memberships.append(membership)
            return membership

        if self._throw:
            decided()
        return decided

    def _planned(self, channel: ControlChannel, pending: PendingSum, number: int) -> Membership | None:
        """Return a membership by the ranks' lengths, which are one more in the sum; ``None`` if some rank has none."""
        self._wait_for_ranks(pending.ready, "the join")
        lengths = [int(value) - 1 for value in pending.wait()]
        unknown = [str(rank) for rank, length in enumerate(lengths) if length < 0]
        if not unknown:
            store: Any = HashStore() if self.store is None else PrefixStore(f"loop/{number}", self.store)
            return StoreMembership(channel, lengths, store, self._throw, self.detector.wait)
        if self._mode == "planned":
            self.refusal = JoinError(
                f"join.mode=planned needs the length of every rank's loader, and that of rank {', '.join(unknown)} has "
                "none. Give it a __len__, or use join.mode=counted, or auto, which counts where lengths are missing."
            )
            raise self.refusal
        return None

    def _current_step(self) -> int | None:
        """The step that this rank is in, for the error messages of others; ``None`` if that is not known."""
        return self._memberships[-1].steps if self._memberships else None

    def _wait_for_ranks(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait without a time limit, since other ranks may still prepare their data; raises if a rank has failed."""
        while not ready(0.5):
            self.detector.check()


class _Entered(threading.local):
    """The joins that are on in a thread, outermost first."""

    def __init__(self) -> None:
        self.sessions: list[JoinSession] = []


_entered = _Entered()
"""Global, as a nested join does not know the one around it."""


def _delete(store: Any, keys: Iterable[str]) -> None:
    """Delete keys, as far as the store is still there."""
    with contextlib.suppress(RuntimeError):
        for key in keys:
            store.delete_key(key)


def _length_of(loader: Any) -> int | None:
    """Return how many batches a loader says that it has, or ``None`` if it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


class _Unusable(Membership):
    """A membership of which no step can begin. It may end: the join may have been used with ``iterate``."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, 1, False, lambda ready, what: None)
        self._reason = reason

    def read(self) -> Any:
        raise JoinError(self._reason)

    def check(self) -> None:
        raise JoinError(self._reason)

    def _begin(self, syncing: bool) -> None:
        raise JoinError(self._reason)

    def _wait_for_next_step(self) -> Any:
        return None


_NO_PLAN = (
    "join.mode=planned has to know how many batches there are: loop over join.iterate(loader), or give the loader to "
    "the join, as in stagereg.instantiate(cfg.join, [model, optimizer], loader=loader)."
)
_SUSPENDED = (
    "a joinable of an outer join was used inside an inner one, where ranks without data do not answer it. Put all that "
    "the inner loop uses in the inner join, or in one join alone."
)
