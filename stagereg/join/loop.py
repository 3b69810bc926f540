"""One loop over data on one rank of a join: who still has data in it, and the batches that its body is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from stagereg.base.option_text import option
from stagereg.errors import JoinError
from stagereg.join.batches import Layout, emptied, emptied_or_error, fetch, has_no_samples, numbers_in, publish
from stagereg.join.counts import Index, SampleCounter
from stagereg.join.peers import Peers
from stagereg.join.responder import Responder
from stagereg.kernel.channel import PendingSum, control_channel, wait_for_keys
from stagereg.kernel.membership import AllReduceMembership, Membership, StoreMembership

Mode = Literal["planned", "counted", "torch", "auto"]


@dataclass(frozen=True)
class Terms:
    """What a join was entered on."""

    mode: str | None  # as in `stagereg.Join`
    throw: bool  # whether all ranks raise when one runs out of data
    needs_active_ranks: bool  # for a step, so that planned lengths are not enough
    several_models: bool = False  # whether there are several of which gradients are reduced
    foreign: str = ""  # why there is no loop of ours, if the first joinable announces through torch's `Join`


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

    def __init__(
        self,
        number: int,
        loader: Any,
        terms: Terms,
        peers: Peers,
        shadow_step: Callable[[], None],
        iterates: bool,
    ) -> None:
        self._terms, self._peers, self._shadow_step = terms, peers, shadow_step
        self._channel = control_channel(peers.group, "membership", peers.wait_for_ranks)
        if peers.responder is None:
            channel = control_channel(peers.group, "mean", peers.wait_for_ranks)
            peers.responder = Responder(channel, 3, peers.detector.wait)
        self._responder = peers.responder
        self.store: Any = PrefixStore(f"loop/{number}", peers.store)
        self.iterates, self.running, self.awaits_step = iterates, False, False
        self.trains = True
        self._closed = False
        self.decided: Membership | None = None
        self.counter: SampleCounter | None = None  # of the batches that it gives, in join.iterate
        self._empty: Any = None  # an empty batch, or why there is none, until it is needed
        self._is_published = False  # to ranks that never had a batch
        self._loader = loader
        self._length: int | None = None
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):  # it has none
            self._length = len(loader)
        self._lengths: PendingSum | None = None
        if terms.mode != "counted" and loader is not None:
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
        terms, peers = self._terms, self._peers
        if self._lengths is not None:
            peers.wait_for_ranks(self._lengths.ready, "the join")
            lengths = [int(value) - 1 for value in self._lengths.wait()]
            unknown = [str(rank) for rank, length in enumerate(lengths) if length < 0]
            if unknown and terms.mode == "planned":
                raise JoinError(
                    f"{option('join.mode', 'planned')} needs the length of every rank's loader, and the loader of rank "
                    f"{', '.join(unknown)} has none. Give it a __len__, or use {option('join.mode', 'counted')}, or "
                    "auto, which then counts."
                )
            if not unknown:
                planned = StoreMembership(self._channel, lengths, self.store, terms.throw, peers.wait)
                if not (terms.needs_active_ranks or (terms.several_models and not self.iterates)):
                    return planned
        return AllReduceMembership(self._channel, terms.throw, peers.wait, self._length)

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
        self._peers.follows = not membership.over
        membership.empty = False
        if membership.expects_empty_step:
            self._shadow_step()
        while not membership.over and self._another_begins(membership):
            self._shadow_step()
        self.close()
        return membership.shadowed == 0

    def close(self) -> None:
        """The loop is over on all ranks; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._peers.end_loop()
            if not self.membership.all_took_every_step:  # else none has answered, and nothing is to end
                self._responder.close()

    def run(self, example: Any, layout: Layout, counter: SampleCounter) -> Iterator[Any]:
        """Yield this rank's batches, which ``counter`` counts, then empty ones for as long as others have some.

        A rank out of data asks, before each step, whether it begins anywhere, and if so its body gets an empty batch.
        The body's forward is no announcement then. What is announced is a forward, not a batch: a batch that the body
        skips is no step.
        """
        self.running = True
        self.counter = counter
        empty, index = None, Index(self._loader)
        try:
            if example is not None and self._channel.size > 1:
                try:
                    empty = emptied(example, layout)
                except JoinError as error:
                    text = f"join.iterate(loader, example=...) got an example with samples, and {error}"
                    raise JoinError(text) from error
            for i, batch in enumerate(self._loader):
                if i == 0 and example is None and self._channel.size > 1:
                    self._empty = emptied_or_error(batch, layout)  # before the body can change it
                self.awaits_step, self.trains = True, torch.is_grad_enabled()
                counter.add(batch, layout)
                index.add(batch)
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
                fresh = emptied(empty, layout, is_empty=True)  # for each step: the body may take items out
                given = index.continued(fresh)
                kept = numbers_in(given) if example is None or not has_no_samples(example) else ()
                counter.add_empty({place: n for place, n in kept if place not in index.places})
                yield given
                membership.empty = False
                if membership.expects_empty_step:  # the body has skipped it, so it also calls no join.mean
                    self._shadow_step()
            self.close()
        finally:
            self.running = self.awaits_step = False

    def _another_begins(self, membership: Membership) -> bool:
        """Without data: wait for the next step; whether there is one."""
        self._peers.progress = self._peers.progress._replace(waits=True)
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
        wait = self._peers.detector.wait
        wait(lambda seconds: wait_for_keys(self.store, ["example"], seconds), "publishing an empty batch")
        return fetch(self.store, "example", self._peers.wire.device)

    @property
    def keys(self) -> list[str]:
        """This rank's share of the keys that the loop leaves in the store."""
        begun = self.decided.keys if isinstance(self.decided, StoreMembership) else ()
        return [*begun, *(["example"] if self._channel.rank == 0 else [])]
