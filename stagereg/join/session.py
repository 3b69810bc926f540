"""One join on one rank, from entering to leaving: its ranks, its steps, and for each loop who still has data.

A joinable gets the session by ``attach``. The session knows process groups, loaders' lengths and the modes of a join;
it does not know what a joinable or a hook does in a step.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from stagereg.errors import JoinError, nearest
from stagereg.join.failure import FailureDetector
from stagereg.join.responder import Responder
from stagereg.kernel.channel import PendingSum, control_channel, resources_of
from stagereg.kernel.membership import AllReduceMembership, Membership, StoreMembership

__all__ = ["EnteredLoop", "JoinSession", "Mode", "one_of"]

Mode = Literal["planned", "counted", "torch", "auto"]


def one_of(what: str, name: str, choices: Any) -> str:
    """Return ``name``. Raises: ``JoinError`` with the nearest name if it is none of a ``Literal``'s."""
    names: Sequence[str] = get_args(choices)
    if name not in names:
        raise JoinError(f"there is no {what} {name!r}.{nearest(str(name), names)} One of: {', '.join(names)}")
    return name


@dataclass(eq=False)
class JoinSession:
    """All ranks construct theirs in the same order.

    Attributes:
        group: the ranks.
        joinables: what takes part, in order.
        mode: as the user chose it.
        throw: whether uneven inputs are an error.
        needs_active_ranks: whether a step depends on who is active, so that planned lengths are not enough.
        foreign: the type of a first joinable that announces through torch's ``Join``, and whose steps on torch's wire
            are not counted; empty if it announces here.
        timeout_s: seconds after which a rank that does not come is an error.
        shadow: takes part in a step by hooks.
        announced: how many steps the first joinable has announced on torch's wire.
        followed: how many steps of torch's wire this rank has taken part in without data.
        plain: the loop that ranks leave when they run out of data; ``None`` if it goes over torch's wire.
        loop: the loop that runs its body on all ranks, while there is one.
        loops: all loops that this rank has entered off torch's wire.
        detector: finds and reports failures of ranks.
        store: of this join alone.
        responder: sums for :meth:`stagereg.Join.mean`; ``None`` on torch's wire.
        awaits_step: whether a loop has given its body a batch of which no step has begun.
        suspended: whether another join has been entered inside this one.
        cannot_plan: whether a loop that ranks leave is an error, as it is to be planned and has no length.
    """

    group: dist.ProcessGroup
    joinables: Sequence[Any]
    mode: str | None
    throw: bool
    needs_active_ranks: bool
    foreign: str
    timeout_s: float
    shadow: Callable[[], None]
    announced: int = 0
    followed: int = 0
    plain: EnteredLoop | None = None
    loop: EnteredLoop | None = None
    loops: list[EnteredLoop] = field(default_factory=list)
    responder: Responder | None = None
    awaits_step: bool = False
    suspended: bool = False
    cannot_plan: bool = False

    def __post_init__(self) -> None:
        name = resources_of(self.group).next_name("join")
        self.detector = FailureDetector(self.group, self.timeout_s, name, self._current_step)
        several = self.group.size() > 1
        self.store: Any = PrefixStore(name, self.group.get_group_store()) if several else HashStore()

    @property
    def membership(self) -> Membership | None:
        """How this rank knows who has data in the loop that runs; ``None`` where it goes over torch's wire.

        Raises:
            JoinError: another join is on inside this one.
        """
        if self.suspended:
            raise JoinError(
                "a joinable of an outer join was used inside an inner one, where ranks without data do not answer it. "
                "Put all that the inner loop uses in the inner join, or in one join alone."
            )
        loop = self.loop or self.plain
        return None if loop is None else loop.membership

    @property
    def all_took_every_step(self) -> bool:
        """Once no rank has data any more: whether all are known to have had data in every step; the same on all."""
        if self.plain is None and (self.announced or self.followed or not self.loops):
            return False  # on torch's wire it is not known
        return all(loop.membership.over and loop.membership.all_took_every_step for loop in self.loops)

    @property
    def steps(self) -> int:
        """How many steps have begun in all loops so far, on this rank or on others while it had no data."""
        return self.announced + self.followed + sum(each.steps for each in self._memberships)

    @property
    def shadowed(self) -> int:
        """How many of them came while this rank had no data."""
        return self.followed + sum(each.shadowed for each in self._memberships)

    @property
    def _memberships(self) -> list[Membership]:
        return [loop.membership for loop in self.loops if loop.is_decided]

    def start(self, loader: Any) -> None:
        """Enter; the join around this one must not be used from now on. Collective.

        Args:
            loader: that of a loop that ranks leave when they run out of data, if it is known. The ranks exchange its
                length now. A join that throws waits for the others' lengths here, any other in its first step.
        """
        for outer in _entered.sessions:
            outer.suspended = True
        _entered.sessions.append(self)
        self.detector.start()
        if self.mode == "torch" or (self.mode is None and loader is None):
            return
        if self.foreign:
            if self.mode in (None, "auto"):
                return
            raise JoinError(
                f"join.mode={self.mode} needs a first joinable that announces through stagereg's Join, but "
                f"{self.foreign} does so through torch's. Put a DDP module first, or use join.mode=torch."
            )
        self.cannot_plan = self.mode == "planned" and loader is None
        if not self.cannot_plan:
            self.plain = EnteredLoop(self, loader)

    def stop(self) -> None:
        """Leave, whatever has happened; the join around this one goes on."""
        if self in _entered.sessions:
            _entered.sessions.remove(self)
        for outer in _entered.sessions[-1:]:
            outer.suspended = False
        self.detector.stop()
        self._delete_keys()

    def _delete_keys(self) -> None:
        """Delete the keys of the join before, if all ranks are past it, and leave this join's to the next one."""
        resources = resources_of(self.group)
        if any(membership.over for membership in self._memberships):
            channel = control_channel(self.group, "membership", self.wait_for_ranks)
            for delete in resources.expired:
                channel.thread.submit(delete)
            resources.expired = []
        resources.expired += [functools.partial(_delete, each.store, each.keys) for each in self.loops]

    def begin(self, reduces: bool) -> Membership | None:
        """A step begins on this rank: announce it; on torch's wire only count it.

        Args:
            reduces: whether its gradients will be reduced among the ranks.

        Returns:
            As :attr:`membership`.
        """
        self.awaits_step = False
        membership = self.membership
        if membership is None and self.cannot_plan:
            raise JoinError(
                "join.mode=planned has to know how many batches there are: loop over join.iterate(loader), or give the "
                "loader to the join, as in stagereg.instantiate(cfg.join, [model, optimizer], loader=loader)."
            )
        if membership is None:
            self.announced += 1
        else:
            membership.begin(reduces)
        return membership

    def wait_for_ranks(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait without a time limit, since other ranks may still prepare their data; raises if a rank has failed."""
        while not ready(0.5):
            self.detector.check()

    def _current_step(self) -> int | None:
        """The step that this rank is in, for the error messages of others; ``None`` if that is not known."""
        memberships = self._memberships
        return memberships[-1].steps if memberships else None


class EnteredLoop:
    """A loop over data. Constructing it is collective: it sends this rank's length to the others, if the mode needs it.

    Args:
        session: of its join.
        loader: this rank's batches, of which the length is used; ``None`` if that is not known.

    Attributes:
        store: with keys that nothing else uses.
    """

    def __init__(self, session: JoinSession, loader: Any) -> None:
        self._session = session
        self._channel = control_channel(session.group, "membership", session.wait_for_ranks)
        if session.responder is None:
            channel = control_channel(session.group, "mean", session.wait_for_ranks)
            session.responder = Responder(channel, 2, session.detector.wait)
        self._responder = session.responder
        self._closed = False
        self._membership: Membership | None = None
        self.store: Any = PrefixStore(f"loop/{len(session.loops)}", session.store)
        self._length = _length_of(loader)
        self._lengths: PendingSum | None = None
        if session.mode != "counted" and loader is not None:
            lengths = [0.0] * self._channel.size
            lengths[self._channel.rank] = 0.0 if self._length is None else self._length + 1.0
            self._lengths = self._channel.add(lengths)
        session.loops.append(self)
        if session.throw:
            _ = self.membership

    @property
    def is_decided(self) -> bool:
        """Whether :attr:`membership` has been asked for."""
        return self._membership is not None

    @property
    def membership(self) -> Membership:
        """Who still has data; waits for the lengths of all ranks the first time.

        Raises:
            JoinError: the join is to plan, and some rank has no length.
            UnevenInputsError: the join is to throw, and the lengths differ.
        """
        if self._membership is None:
            self._membership = self._decided()
        return self._membership

    def _decided(self) -> Membership:
        session = self._session
        planned = None if self._lengths is None else self._planned(self._lengths)
        if planned is not None and not session.needs_active_ranks:
            return planned
        counted = AllReduceMembership(self._channel, session.throw, session.detector.wait, self._length)
        counted.even = planned is not None and planned.even
        return counted

    def leave(self) -> bool:
        """Take part by hooks in what is left of the loop, which this rank has left by itself.

        Returns:
            Whether this rank had data in the last step.
        """
        membership = self.membership
        membership.empty = False
        if membership.expects_empty_step:
            self.shadow_step()
        while not membership.over and membership.wait_for_next_step() is not None:
            self.shadow_step()
        self.close()
        return membership.shadowed == 0

    def shadow_step(self) -> None:
        """Take part in a step by hooks, and in its :meth:`stagereg.Join.mean` by zeros."""
        self._responder.start()
        self._session.shadow()

    def close(self) -> None:
        """The loop is over on all ranks; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._session.loop = None
            if not self.membership.all_took_every_step:  # else none has answered, and nothing is to end
                self._responder.close()

    @property
    def keys(self) -> list[str]:
        """This rank's share of the keys that the loop leaves in the store."""
        begun = self._membership.keys if isinstance(self._membership, StoreMembership) else ()
        return [*begun, *(["example"] if self._channel.rank == 0 else [])]

    def _planned(self, lengths: PendingSum) -> Membership | None:
        """Return a membership by the ranks' lengths, which are one more in the sum; ``None`` if some rank has none."""
        session = self._session
        session.wait_for_ranks(lengths.ready, "the join")
        announced = [int(value) - 1 for value in lengths.wait()]
        unknown = [str(rank) for rank, length in enumerate(announced) if length < 0]
        if not unknown:
            return StoreMembership(self._channel, announced, self.store, session.throw, session.detector.wait)
        if session.mode == "planned":
            raise JoinError(
                f"join.mode=planned needs the length of every rank's loader, and that of rank {', '.join(unknown)} has "
                "none. Give it a __len__, or use join.mode=counted, or auto, which counts where lengths are missing."
            )
        return None


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
