"""A loop whose body runs on every rank for as long as any rank has data.

A rank out of data asks, before each step, whether it begins anywhere, and if so its body gets an empty batch. The
body's forward is no announcement then. What is announced is a forward, not a batch: a batch that the body skips is no
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from stagereg.errors import JoinError
from stagereg.join.empty import emptied, fetch, publish
from stagereg.join.responder import SumResponder
from stagereg.join.samples import Given
from stagereg.join.session import Wiring
from stagereg.kernel.channel import wait_for_keys
from stagereg.kernel.membership import Membership

__all__ = ["Loop"]

_NOTHING = object()


class Loop:
    """One loop over a loader, on one rank.

    Args:
        wiring: of its join.
        shadow: takes part in a step by hooks, for a body that has nothing to do with an empty batch.
        given: counts this rank's batches.

    Attributes:
        membership: who still has data, once it has started.
        running: whether its generator has begun, and has neither ended nor been closed.
    """

    membership: Membership

    def __init__(self, wiring: Wiring, shadow: Callable[[], None], given: Given) -> None:
        self.running = False
        self._started = False
        self._closed = False
        self._wiring = wiring
        self._shadow = shadow
        self._given = given

    def start(self, loader: Iterable[Any]) -> Membership:
        """Exchange what there is to be exchanged; collective."""
        self.membership = self._wiring.looped(loader)
        self._started = True
        return self.membership

    def run(self, loader: Iterable[Any], example: Any, device: torch.device) -> Iterator[Any]:
        """Yield this rank's batches, then empty ones for as long as others have some.

        Args:
            loader: what :meth:`start` was called with.
            example: a batch to be emptied, or ``None``.
            device: for empty batches that come from another rank.
        """
        self.running = True
        try:
            yield from self._run(loader, example, device)
        finally:
            self.running = False

    @property
    def empty(self) -> bool:
        """Whether the body runs on an empty batch."""
        return self._started and self.membership.empty

    def _run(self, loader: Iterable[Any], example: Any, device: torch.device) -> Iterator[Any]:
        membership = self.membership
        cut = _NOTHING if example is None else _emptied(example)
        key = f"example/{self._wiring.loops}"
        batch = _NOTHING
        for i, batch in enumerate(loader):
            if i == 0 and self._wiring.store is not None:
                try:
                    publish(self._wiring.store, key, batch if cut is _NOTHING else cut)
                except JoinError:  # told to those who may ask for it
                    if cut is _NOTHING and not membership.even:
                        raise
            membership.expected = True
            self._given.add(batch)
            yield batch
        membership.expected = False
        while membership.wait_for_next_step() is not None:
            if cut is _NOTHING:
                cut = self._from_others(key, device) if batch is _NOTHING else emptied(batch)
            batch = _NOTHING
            membership.expect_empty_step()
            membership.empty = True
            yield cut
            membership.empty = False
            if membership.expects_empty_step:  # the body passed over it, so it also calls no join.mean
                self._sum_responder.start()
                self._shadow()
        self.close()

    def close(self) -> None:
        """The loop is over on all ranks; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._sum_responder.close()

    @property
    def _sum_responder(self) -> SumResponder:
        assert self._wiring.sum_responder is not None
        return self._wiring.sum_responder

    def leave(self) -> bool:
        """Whether this rank left before it ran a step that others have begun; it has no body any more."""
        self.membership.empty = False
        return self.membership.expects_empty_step

    def _from_others(self, key: str, device: torch.device) -> Any:
        """Return the empty batch of a rank that had one: it has told before its first step began."""
        store: Any = self._wiring.store
        self._wiring.detector.wait(lambda seconds: wait_for_keys(store, key, seconds), "telling how a batch looks")
        return fetch(store, key, device)


def _emptied(example: Any) -> Any:
    try:
        return emptied(example)
    except JoinError:
        return example  # an empty one, as the user has said
