"""One loop over data in a join, on one rank: tracks which ranks still have data, and yields batches to the body."""

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
    """The options with which a join was entered."""

    mode: str | None  # see `stagereg.Join`
    throw: bool  # whether all ranks raise when one rank runs out of data
    needs_active_ranks: bool  # whether each step needs the active ranks, not only the planned lengths
    several_models: bool = False  # whether several joinables reduce gradients
    foreign: str = ""  # why join.iterate is unavailable, if the first joinable uses torch's `Join`


class Loop:
    """A loop over data, on one rank.

    In a plain loop, a rank that runs out of data leaves the loop. With ``join.iterate``, all ranks run the loop body
    until no rank has data. The constructor is collective if ``mode`` requires the loader lengths: ranks exchange them.

    Attributes:
        iterates: whether the loop uses ``join.iterate``.
        running: whether the generator of :meth:`run` has begun, and has neither ended nor been closed.
        awaits_step: whether the body has received a batch and no step has begun on this batch.
        trains: whether gradients were enabled when the body received the batch. If not, the loop is an evaluation.
        streams: whether ``join.mean`` may sum losses on their device. False once a rank could not, equal on all ranks.
        decided: the value of :attr:`membership`, or ``None`` before its first access.
    """

    def __init__(
        self, number: int, loader: Any, terms: Terms, peers: Peers, shadow_step: Callable[[], None], iterates: bool
    ) -> None:
        self._terms, self._peers, self._shadow_step = terms, peers, shadow_step
        self._channel = control_channel(peers.group, "membership", peers.wait_for_ranks)
        if peers.responder is None:
            channel = control_channel(peers.group, "mean", peers.wait_for_ranks)
            peers.responder = Responder(channel, 5, peers.detector.wait)
        self._responder = peers.responder
        self.store: Any = PrefixStore(f"loop/{number}", peers.store)
        self.iterates, self.running, self.awaits_step = iterates, False, False
        self.trains = self.streams = True
        self._closed = False
        self.decided: Membership | None = None
        self.counter: SampleCounter | None = None  # counts the batches of join.iterate
        self._empty: Any = None  # an empty batch, or the error from emptying a batch
        self._is_published = False  # whether this rank has offered its empty batch to ranks that never had a batch
        self._loader = loader
        self._length: int | None = None
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):  # the loader has no length
            self._length = len(loader)
        self._lengths: PendingSum | None = None
        if terms.mode != "counted" and loader is not None:
            lengths = [0.0] * self._channel.size
            lengths[self._channel.rank] = 0.0 if self._length is None else self._length + 1.0
            self._lengths = self._channel.add(lengths)

    @property
    def membership(self) -> Membership:
        """The ranks that still have data. The first access waits for the loader lengths of all ranks."""
        if self.decided is None:
            self.decided = self._decide()
        return self.decided

    def _decide(self) -> Membership:
        terms, peers = self._terms, self._peers
        if self._lengths is not None:
            peers.wait_for_ranks(self._lengths.ready, "the join")
            lengths = [int(value) - 1 for value in self._lengths.wait()]
            unknown = [str(rank) for rank, length in zip(self._channel.ranks, lengths, strict=True) if length < 0]
            if unknown and terms.mode == "planned":
                raise JoinError(
                    f"{option('join.mode', 'planned')} needs the length of every rank's loader, but the loader of rank "
                    f"{', '.join(unknown)} has none. Give it a __len__, or use {option('join.mode', 'counted')} or "
                    "auto, which counts if a length is missing."
                )
            if not unknown:
                planned = StoreMembership(self._channel, lengths, self.store, terms.throw, peers.wait)
                if not (terms.needs_active_ranks or (terms.several_models and not self.iterates)):
                    return planned
        return AllReduceMembership(self._channel, terms.throw, peers.wait, self._length)

    def begin(self, membership: Membership, reduces: bool | None) -> None:
        """Begin a step on this rank, and announce the step to the other ranks."""
        self.awaits_step = False
        if self.iterates and membership.over:
            raise JoinError(
                "a step began in a join after its join.iterate had ended. Run all steps of a join inside "
                "join.iterate, or use a separate join for the other steps."
            )
        membership.begin(reduces)
        if not (self._is_published or self._empty is None or membership.empty):
            self._is_published = True
            self._publish(self._empty, membership)

    def leave(self) -> bool:
        """Run the hooks until the loop has ended on all ranks. Return whether this rank had data in the last step."""
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
        """End the loop on this rank. Called when no rank has data. Idempotent."""
        if not self._closed:
            self._closed = True
            self._peers.end_loop()
            if not self.membership.all_took_every_step:  # otherwise no rank responded to join.mean requests
                self._responder.close()

    def run(self, example: Any, layout: Layout, counter: SampleCounter) -> Iterator[Any]:
        """Yield this rank's batches, then empty batches while other ranks have data. Counts all batches in ``counter``.

        A step begins with a forward, so a batch that the body skips is not a step. A rank without data waits until a
        step begins on some rank, then yields an empty batch. A forward on an empty batch is not announced.
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
                    self._empty = emptied_or_error(batch, layout)  # copied before the body can change the batch
                self.awaits_step, self.trains = True, torch.is_grad_enabled()
                counter.add(batch, layout)
                index.add(batch)
                yield batch
                del batch  # so that the memory of the batch can be freed
            self.awaits_step = False
            while self._another_begins(membership := self.membership):
                if empty is None:
                    empty = self._from_other_rank() if self._empty is None else self._empty
                if isinstance(empty, JoinError):
                    raise empty
                membership.expects_empty_step = True
                membership.empty = self.awaits_step = True
                self.trains = torch.is_grad_enabled()
                fresh = emptied(empty, layout, is_empty=True)  # a new copy per step, because the body may change it
                given = index.continued(fresh)
                kept = numbers_in(given) if example is None or not has_no_samples(example) else ()
                counter.add_empty({place: n for place, n in kept if place not in index.places})
                yield given
                membership.empty = False
                if membership.expects_empty_step:  # the body skipped the batch, so it called no join.mean either
                    self._shadow_step()
            self.close()
        finally:
            self.running = self.awaits_step = False

    def _another_begins(self, membership: Membership) -> bool:
        """On a rank without data: wait until another step begins or the loop ends, and return whether a step begins."""
        self._peers.progress = self._peers.progress._replace(waits=True)
        return membership.wait_for_next_step() is not None

    def _publish(self, example: Any, membership: Membership) -> None:

        def publish_if_needed() -> None:
            with contextlib.suppress(RuntimeError):  # a RuntimeError here means that all ranks have failed
                if membership.some_never_had_data():
                    publish(self.store, "example", example)

        if isinstance(membership, StoreMembership):
            publish_if_needed()
        else:
            self._channel.thread.submit(publish_if_needed)  # blocks until the other ranks begin the step

    def _from_other_rank(self) -> Any:
        """Return the empty batch that another rank publishes in its first step."""
        if self._length and isinstance(self.membership, StoreMembership):
            raise JoinError(
                f"the loader of this rank has length {self._length} but yielded no batch to derive an empty batch "
                "from. Pass an empty batch: join.iterate(loader, example=...)"
            )
        wait = self._peers.detector.wait
        wait(lambda seconds: wait_for_keys(self.store, ["example"], seconds), "publishing an empty batch")
        return fetch(self.store, "example", self._peers.wire.device)

    @property
    def keys(self) -> list[str]:
        """The keys of this loop in the rendezvous store that this rank must delete."""
        begun = self.decided.keys if isinstance(self.decided, StoreMembership) else ()
        return [*begun, *(["example"] if self._channel.rank == 0 else [])]
