"""One join on one rank, from entering to leaving: its ranks, its hooks, its loops, and who still has data in each.

The join's context manager makes a session when it is entered, and a joinable gets it by ``attach``. The session knows
process groups, loaders' lengths and the modes of a join; it does not know what a joinable or a hook does in a step.

All steps of a join belong to the loop that was entered last, or go over torch's wire, where there is no loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from stagereg.errors import (
    JoinError,
    PeerFailedError,
    Preempted,
    StageregError,
    Stopped,
    UnevenInputsError,
    nearest,
)
from stagereg.join.batches import SampleCounter, emptied_or_error, fetch, publish
from stagereg.join.failure import FailureDetector
from stagereg.join.progress import Progress
from stagereg.join.responder import Responder
from stagereg.kernel.channel import LIMIT_S, PendingSum, control_channel, resources_of, wait_for_keys
from stagereg.kernel.membership import AllReduceMembership, Membership, StoreMembership
from stagereg.kernel.shadow import PEER_EXHAUSTED, TorchWire
from stagereg.sockets import BegunSteps, PeerSockets

E = TypeVar("E", bound=BaseException)

_LOOK_S = 0.0005

Mode = Literal["planned", "counted", "torch", "auto"]
_entered: ContextVar[tuple[JoinSession, ...]] = ContextVar("entered", default=())
"""The joins that are on in a thread, outermost first. Global, as a nested join does not know the one around it."""


class Follower(Protocol):
    """Something that all ranks do together at a step, such as saving, also those that have left a plain loop."""

    def follow(self) -> None:
        """Do what ranks in the loop have done since the last step; on a rank that has left it, between two steps."""

    def loop_ended(self) -> None:
        """No rank is in the loop any more, and each has done what the others did."""


followers: weakref.WeakSet[Follower] = weakref.WeakSet()
"""Global, as neither the join nor what follows it is given the other."""


def one_of(what: str, name: str, choices: Any) -> str:
    """Return ``name``. Raises: ``JoinError`` with the nearest name if it is none of a ``Literal``'s."""
    names: Sequence[str] = get_args(choices)
    if name not in names:
        raise JoinError(f"there is no {what} {name!r}.{nearest(str(name), names)} One of: {', '.join(names)}")
    return name


@dataclass(eq=False)
class JoinSession:
    """All ranks construct theirs in the same order."""

    wire: TorchWire
    joinables: Sequence[Any]
    mode: str | None
    throw: bool
    needs_active_ranks: bool  # for a step, so that planned lengths are not enough
    foreign: str  # the type of a first joinable that announces through torch's ``Join``; empty if it announces here
    timeout_s: float
    hooks: Sequence[Any] = ()
    own_hooks: Sequence[Any] = ()  # those that are a ``JoinHook`` of stagereg's
    announced: int = 0  # steps, by the first joinable, on torch's wire
    followed: int = 0  # steps of torch's wire, without data
    loop: Loop | None = None  # that was entered last; ``None`` on torch's wire
    loops: list[Loop] = field(default_factory=list)
    responder: Responder | None = None  # for the sums of ``join.mean``; ``None`` on torch's wire
    suspended: bool = False  # as another join has been entered inside this one
    follows: bool = False  # as this rank has left its loop, so that its followers do what those of others do
    failed: bool = False  # so that some rank may still wait on a channel
    progress: Progress = field(default_factory=Progress)  # for what the ranks know of each other

    def __post_init__(self) -> None:
        self.group = self.wire.group
        name = self.name = resources_of(self.group).next_name("join")
        self.detector = FailureDetector(
            self.group,
            self.timeout_s,
            name,
            step=lambda: self.steps or None,
            elsewhere=self._is_elsewhere,
            progress=lambda: self.progress,
        )
        several = self.group.size() > 1
        self.store: Any = PrefixStore(name, self.group.get_group_store()) if several else HashStore()

    @property
    def membership(self) -> Membership | None:
        """How this rank knows who has data in the loop that runs; ``None`` where it goes over torch's wire."""
        if self.suspended:
            raise JoinError(
                "a joinable of an outer join was used inside an inner one, where ranks without data do not answer it. "
                "Put all that the inner loop uses in the inner join."
            )
        return None if self.loop is None else self.loop.membership

    @property
    def all_took_every_step(self) -> bool:
        """Once no rank has data any more: whether all are known to have had data in every step; the same on all."""
        known = self.loop is not None  # not on torch's wire
        return known and all(loop.membership.over and loop.membership.all_took_every_step for loop in self.loops)

    @property
    def steps(self) -> int:
        """How many steps have begun in all loops so far, on this rank or on others while it had no data."""
        return self.announced + self.followed + sum(each.steps for each in self._memberships)

    @property
    def shadowed(self) -> int:
        """How many of them came while this rank had no data."""
        return self.followed + sum(each.shadowed for each in self._memberships)

    def _is_elsewhere(self) -> bool:
        """Whether this rank does not run the loop's body, so that it calls nothing that the others do."""
        return self.follows or (self.responder is not None and self.responder.running)

    @property
    def _memberships(self) -> list[Membership]:
        return [loop.decided for loop in self.loops if loop.decided is not None]

    def start(self, loader: Any, options: Mapping[str, Any]) -> None:
        """Enter; the join around this one must not be used from now on. Collective.

        Args:
            loader: that of a loop that ranks leave when they run out of data, if it is known.
            options: that are to be the same on all ranks; the first to come says what they are.

        Raises:
            JoinError: another rank has entered with other options.
        """
        for outer in _entered.get():
            outer.suspended = True
        _entered.set((*_entered.get(), self))
        self.detector.start()
        self._expect_alike(options)
        if self.mode == "torch" or (self.mode is None and loader is None):
            return
        if self.foreign and self.mode in (None, "auto"):
            return
        if self.foreign or self.mode != "planned" or loader is not None:  # else there has to be a join.iterate
            self.enter_loop(loader)

    def enter_loop(self, loader: Any) -> Loop:
        """Enter a loop in the place of the one before, which ends now on this rank. Collective."""
        if self.foreign:
            raise JoinError(
                f"{self.foreign}, the first joinable, announces through torch's Join, which join.iterate and "
                "join.mode=counted or planned cannot use. Put the model first, or use join.mode=torch in a plain loop."
            )
        before = self.loop
        if before is not None and before.running:
            raise JoinError(
                "another join.iterate of this join has not come to its end, and only one runs at a time. Evaluate "
                "after it, or loop over the loader itself under torch.no_grad()."
            )
        if self.announced or (before is not None and not before.iterates and before.decided and before.decided.steps):
            raise JoinError(
                "a step of this join has begun outside of join.iterate already. Take all steps of a join inside of "
                "join.iterate, or none; put others in a join of their own."
            )
        if before is not None and before.iterates:
            before.leave()
        elif before is not None:
            self.loops.remove(before)
        self.loop = Loop(self, loader)
        self.loops.append(self.loop)
        if self.throw:
            _ = self.loop.membership
        return self.loop

    def begin(self, reduces: bool | None) -> Membership | None:
        """A step begins on this rank, and ``reduces`` gradients or not: announce it; count it on torch's wire.

        ``None``: whether it does is not known yet, as an evaluation comes first on its batch.
        """
        membership = self.membership
        if membership is not None and self.loop is not None:
            self.loop.begin(membership, reduces)
        elif self.mode == "planned":
            raise JoinError(
                "join.mode=planned has to know how many batches there are: loop over join.iterate(loader), or give the "
                "join the loader, as in stagereg.instantiate(cfg.join, ..., loader=loader)."
            )
        else:
            self.announced += 1
        self.progress = self.progress.begun(self.steps)
        return membership

    def count_forward(self, gathers: bool, trains: bool) -> None:
        """A forward runs, and if it begins a step, that has begun.

        Args:
            gathers: whether it has collectives, with the forwards of all other ranks.
            trains: whether it is the training forward with which a step begins. Before any other, the ranks meet.
        """
        progress = self.progress.begun(self.steps)
        if gathers:
            progress = progress.mark() if trains else progress
            progress = progress._replace(forwards=progress.forwards + 1)
        self.progress = progress
        if gathers and not trains and self.group.size() > 1:
            met = control_channel(self.group, "forward", self.detector.wait).add([])
            self.wait(met.ready, "a forward under no_grad")

    def count_backward(self) -> None:
        """A backward runs, of a module whose forwards have collectives."""
        self.progress = self.progress.mark()

    def count_reduction(self, joinable: Any) -> None:
        """A joinable's gradients are reduced in this step, which begins with the first one that has some."""
        if joinable is next(each for each in self.joinables if each.reduces_gradients):
            self.progress = self.progress._replace(reduced=True)

    def _expect_alike(self, options: Mapping[str, Any]) -> None:
        own = json.dumps(options, default=str)
        others = json.loads(self.store.compare_set("options", "", own))
        for name, value in json.loads(own).items():
            if others[name] != value:
                error = JoinError(
                    f"join.{name} is not the same on all ranks: here it is {value}, elsewhere {others[name]}. Give all "
                    "ranks the same options."
                )
                self.detector.report(error)
                raise error

    def shadow_step(self) -> None:
        """Take part in a step by hooks, and in its :meth:`stagereg.Join.mean` by zeros."""
        self.follow()
        if self.responder is not None:
            self.responder.start()
        self.progress = self.progress.begun(self.steps)
        for hook in self.own_hooks:
            hook.before_step()
        for hook in self.hooks:
            hook.main_hook()
        for joinable in self.joinables:
            if joinable.reduces_gradients and joinable.reduced:
                self.count_reduction(joinable)

    def finish(self) -> None:
        """This rank has left its loop with nothing wrong: take part until no rank has data any more."""
        passed = self.loop is not None and self.loop.iterates and self.loop.membership.over  # by all ranks together
        if not passed and any(joinable.has_unfinished_step for joinable in self.joinables):
            raise JoinError(
                "this rank leaves the join after a forward without a backward, and the others wait for its gradients. "
                "Run forwards that are no training steps under torch.no_grad()."
            )
        for hook in self.own_hooks:
            hook.on_exhausted()
        if self.loop is not None:
            was_last = self.loop.leave()
        else:
            self.follows = True
            while self.mode != "planned" and self._count_active():
                if self.throw:
                    self.wire.raise_if_exhausted(joined=True)
                self.followed += 1
                self.shadow_step()
            was_last = not self.followed
            self.end_loop()
        for hook in self.hooks:
            hook.post_hook(was_last)

    def follow(self) -> None:
        """Do what ranks in the loop have done, if this one has left it."""
        if self.follows:
            for follower in list(followers):
                follower.follow()

    def end_loop(self) -> None:
        """No rank has data any more."""
        self.follow()
        self.follows = False
        for follower in list(followers):
            follower.loop_ended()

    def wait(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait for other ranks, as the detector does, and follow them meanwhile."""

        def ready_to_go_on(seconds: float) -> bool:
            self.follow()
            return ready(seconds)

        self.detector.wait(ready_to_go_on, what)

    def _count_active(self) -> int:
        """Without data, on torch's wire: how many ranks begin another step; waits for them, and follows them."""
        self.progress = self.progress._replace(waits=True)
        total = torch.zeros(1, device=self.wire.device)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        # A wait with a time-out is a look for gloo; backends of accelerators may abort the group after it.
        ready = PendingSum(array("d"), work).ready if total.is_cpu else functools.partial(_wait_for_work, work)
        self.wait(ready, "the next step")
        return int(total.item())

    def give_up(self, error: BaseException) -> None:
        """This rank leaves with an error: report it to the other ranks, or raise what theirs was."""
        _add_note(error)
        if type(error) is RuntimeError and str(error) == PEER_EXHAUSTED:
            raise _add_note(UnevenInputsError(PEER_EXHAUSTED)) from error  # of torch's notify, inside a torch joinable
        membership = None if self.loop is None else self.loop.decided
        if isinstance(error, UnevenInputsError) and not isinstance(membership, StoreMembership):
            if self.responder is not None:
                self.responder.close()
            return  # all ranks raise it; of a plan, only this rank can know that it ran out too early
        self.failed = True
        if isinstance(error, (PeerFailedError, Preempted, Stopped)):  # by the latter two all ranks leave together
            return
        if isinstance(error, RuntimeError) and not isinstance(error, JoinError):
            cause = self.detector.explain(error)
            if cause is not None:
                raise _add_note(cause) from (None if isinstance(cause, UnevenInputsError) else error)
        self.detector.report(error)
        if membership is not None and membership.empty and _is_foreign(error):
            error.add_note(
                "This rank has no more data, and join.iterate ran the loop body on an empty batch. What the body does "
                "with samples must bear that there are none: x.flatten(1), not x.view(len(x), -1); sums, not means."
            )

    def stop(self) -> None:
        """Leave; the join around this one goes on."""
        _entered.set(tuple(each for each in _entered.get() if each is not self))
        for outer in _entered.get()[-1:]:
            outer.suspended = False
        # The keys of the join before are deleted once all ranks are past it, and this join's are left to the next one.
        resources = resources_of(self.group)
        if any(membership.over for membership in self._memberships):
            thread = control_channel(self.group, "membership", self.wait_for_ranks).thread
            for delete in resources.expired:
                thread.submit(delete, wake=False)
            resources.expired = []
        resources.expired += [functools.partial(_delete, each.store, each.keys) for each in self.loops]
        if self.group.rank() == 0:
            resources.expired.append(functools.partial(_delete, self.store, ["options"]))
        self.detector.stop()

    def wait_for_ranks(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait as long as torch does, since other ranks may still prepare their data; raises if a rank has failed."""
        self.detector.wait(ready, what, LIMIT_S)


class Loop:
    """A loop over data, on one rank. Ranks leave it when they run out of data, or it runs its body on all ranks.

    Constructing it is collective: it sends the length of this rank's loader to the others, if the mode needs it.

    Attributes:
        iterates: whether it runs its body on all ranks.
        running: whether the generator of :meth:`run` has begun, and has neither ended nor been closed.
        awaits_step: whether it has given its body a batch of which no step has begun.
        trains: whether gradients were on when it gave its body a batch; else all of it is an evaluation.
        decided: :attr:`membership`, once that has been asked for.
    """

    def __init__(self, session: JoinSession, loader: Any) -> None:
        self._session = session
        self._channel = control_channel(session.group, "membership", session.wait_for_ranks)
        if session.responder is None:
            channel = control_channel(session.group, "mean", session.wait_for_ranks)
            session.responder = Responder(channel, 3, session.detector.wait)
        self._responder = session.responder
        name = f"loop/{len(session.loops)}"
        self.store: Any = PrefixStore(name, session.store)
        self._begun: Any = self.store  # where ranks with data set a key when a step begins
        if isinstance(self._channel.backend, PeerSockets):
            self._begun = BegunSteps(self._channel.backend, f"{session.name}/{name}")
        self.iterates = self.running = self.awaits_step = False
        self.trains = True
        self._closed = False
        self.decided: Membership | None = None
        self._empty: Any = None  # an empty batch, or why there is none, until it is needed
        self._is_published = False  # to ranks that never had a batch
        self._loader = loader
        self._length: int | None = None
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):  # it has none
            self._length = len(loader)
        self._lengths: PendingSum | None = None
        if session.mode != "counted" and loader is not None:
            lengths = [0.0] * self._channel.size
            lengths[self._channel.rank] = 0.0 if self._length is None else self._length + 1.0
            self._lengths = self._channel.add(lengths)

    @property
    def membership(self) -> Membership:
        """Who still has data; waits for the lengths of all ranks the first time."""
        if self.decided is None:
            self.decided = self._decide()
        return self.decided

    def _decide(self) -> Membership:
        session = self._session
        if self._lengths is not None:
            session.wait_for_ranks(self._lengths.ready, "the join")
            lengths = [int(value) - 1 for value in self._lengths.wait()]
            unknown = [str(rank) for rank, length in enumerate(lengths) if length < 0]
            if unknown and session.mode == "planned":
                raise JoinError(
                    f"join.mode=planned needs the length of every rank's loader, and that of rank {', '.join(unknown)} "
                    "has none. Give it a __len__, or use join.mode=counted, or auto, which then counts."
                )
            if not unknown:
                planned = StoreMembership(self._channel, lengths, self._begun, session.throw, session.wait)
                if not session.needs_active_ranks:
                    return planned
        return AllReduceMembership(self._channel, session.throw, session.wait, self._length)

    def begin(self, membership: Membership, reduces: bool | None) -> None:
        """A step begins on this rank."""
        self.awaits_step = False
        if self.iterates and membership.over:
            raise JoinError(
                "a step began in a join after its join.iterate had ended. Take all steps of a join inside of "
                "join.iterate, or put others in a join of their own."
            )
        membership.begin(reduces)
        if not (self._is_published or self._empty is None or membership.empty):
            self._is_published = True
            self._publish(self._empty, membership)

    def leave(self) -> bool:
        """Take part by hooks in what is left of the loop; return whether this rank had data in the last step."""
        membership = self.membership
        self._session.follows = not membership.over
        membership.empty = False
        if membership.expects_empty_step:
            self._session.shadow_step()
        while not membership.over and self._another_begins(membership):
            self._session.shadow_step()
        self.close()
        return membership.shadowed == 0

    def close(self) -> None:
        """The loop is over on all ranks; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._session.end_loop()
            if isinstance(self._begun, BegunSteps):
                self._begun.clear()
            if not self.membership.all_took_every_step:  # else none has answered, and nothing is to end
                self._responder.close()

    def run(self, example: Any, counter: SampleCounter) -> Iterator[Any]:
        """Yield this rank's batches, which ``counter`` counts, then empty ones for as long as others have some.

        A rank out of data asks, before each step, whether it begins anywhere, and if so its body gets an empty batch.
        The body's forward is no announcement then. What is announced is a forward, not a batch: a batch that the body
        skips is no step.
        """
        self.iterates = self.running = True
        empty = None if example is None else _empty_example(example)
        try:
            for i, batch in enumerate(self._loader):
                if i == 0 and example is None and self._channel.size > 1:
                    self._empty = emptied_or_error(batch)  # before the body can change it
                self.awaits_step, self.trains = True, torch.is_grad_enabled()
                counter.add(batch)
                yield batch
                del batch  # so that its memory can be freed
            self.awaits_step = False
            while self._another_begins(membership := self.membership):
                if empty is None:
                    empty = self._from_other_rank() if self._empty is None else self._empty
                if isinstance(empty, JoinError):
                    raise empty
                membership.expects_empty_step = True
                membership.empty = self.awaits_step = True
                self.trains = torch.is_grad_enabled()
                yield _empty_example(empty)  # anew each time: the body may take its items out
                membership.empty = False
                if membership.expects_empty_step:  # the body has skipped it, so it also calls no join.mean
                    self._session.shadow_step()
            self.close()
        finally:
            self.running = self.awaits_step = False

    def _another_begins(self, membership: Membership) -> bool:
        """Without data: wait for the next step; whether there is one."""
        self._session.progress = self._session.progress._replace(waits=True)
        return membership.wait_for_next_step() is not None

    def _publish(self, example: Any, membership: Membership) -> None:
        """Give ranks that never had a batch an empty one; this rank's first step has begun."""

        def publish_if_needed() -> None:
            with contextlib.suppress(RuntimeError):  # then all have failed
                if membership.some_never_had_data():
                    publish(self.store, "example", example)

        if isinstance(membership, StoreMembership):
            publish_if_needed()
        else:
            self._channel.thread.submit(publish_if_needed)  # it waits for the other ranks to begin the step

    def _from_other_rank(self) -> Any:
        """Return the empty batch of a rank that had one, which it publishes as its first step begins."""
        if self._length and isinstance(self.membership, StoreMembership):
            raise JoinError(
                f"the loader of this rank has a length of {self._length}, but gave no batch at all, so it is not known "
                "what an empty one is: join.iterate(loader, example=...)"
            )
        wait = self._session.detector.wait
        wait(lambda seconds: wait_for_keys(self.store, ["example"], seconds), "publishing an empty batch")
        return fetch(self.store, "example", self._session.wire.device)

    @property
    def keys(self) -> list[str]:
        """This rank's share of the keys that the loop leaves in the store."""
        begun = self.decided.keys if isinstance(self.decided, StoreMembership) and self._begun is self.store else ()
        return [*begun, *(["example"] if self._channel.rank == 0 else [])]


def _add_note(error: E) -> E:
    """Return an error, with what may be behind it where ranks seem to have different numbers of steps."""
    if isinstance(error, UnevenInputsError):
        error.add_note("Any forward that is not under torch.no_grad() counts as a training step.")
    return error


def _is_foreign(error: BaseException) -> bool:
    """Whether it may be of code that does not bear an empty batch."""
    return isinstance(error, Exception) and not isinstance(error, StageregError)


def _wait_for_work(work: Any, seconds: float) -> bool:
    """Wait for a collective, no longer than so many seconds."""
    ends = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < ends:
        time.sleep(_LOOK_S)
    if work.is_completed():
        work.wait()  # raises what it failed with
    return bool(work.is_completed())


def _delete(store: Any, keys: Sequence[str]) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone
        for key in keys:
            store.delete_key(key)


def _empty_example(example: Any) -> Any:
    empty = emptied_or_error(example)
    return example if isinstance(empty, JoinError) else empty  # what is not known to be empty is, as the user has said
