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
from stagereg.join.batches import SampleCounter, emptied, fetch, publish
from stagereg.join.session import JoinSession
from stagereg.kernel.channel import wait_for_keys
from stagereg.kernel.membership import Membership

__all__ = ["Loop"]

_NOTHING = object()


class Loop:
    """One loop over a loader, on one rank. Constructing it is collective: lengths are exchanged.

    Args:
        session: of its join.
        loader: this rank's batches.
        shadow: takes part in a step by hooks, for a body that has skipped an empty batch.
        counter: counts this rank's batches.

    Attributes:
        running: whether its generator has begun, and has neither ended nor been closed.
    """

    def __init__(
        self, session: JoinSession, loader: Iterable[Any], shadow: Callable[[], None], counter: SampleCounter
    ) -> None:
        self.running = False
        self._closed = False
        self._session = session
        self._loader = loader
        self._shadow = shadow
        self._counter = counter
        self._key = f"example/{session.loops}"
        self._decided = session.start_loop(loader)

    @property
    def membership(self) -> Membership:
        """Who still has data; waits for the lengths of all ranks the first time."""
        return self._decided()

    def run(self, example: Any, device: torch.device) -> Iterator[Any]:
        """Yield this rank's batches, then empty ones for as long as others have some.

        Args:
            example: a batch to be emptied, or ``None``.
            device: for empty batches that come from another rank.
        """
        self.running = True
        try:
            yield from self._run(example, device)
        finally:
            self.running = False

    def _run(self, example: Any, device: torch.device) -> Iterator[Any]:
        empty = _NOTHING if example is None else _emptied_if_possible(example)
        batch = _NOTHING
        for i, batch in enumerate(self._loader):
            if i == 0:
                self._publish(batch, empty)
            self._session.awaits_step = True
            self._counter.add(batch)
            yield batch
        self._session.awaits_step = False
        membership = self.membership
        while membership.wait_for_next_step() is not None:
            if empty is _NOTHING:
                empty = self._from_other_rank(device) if batch is _NOTHING else emptied(batch)
            batch = _NOTHING  # so that its memory can be freed
            membership.expects_empty_step = True
            membership.empty = self._session.awaits_step = True
            yield _emptied_if_possible(empty)  # anew each time: the body may take its items out
            membership.empty = False
            if membership.expects_empty_step:  # the body has skipped it, so it also calls no join.mean
                self.shadow_step()
        self.close()

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
        """Take part in a step by hooks, and in its means by zeros."""
        self._session.answer()
        self._shadow()

    def close(self) -> None:
        """The loop is over on all ranks; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._session.end_answers(self.membership)

    def _publish(self, batch: Any, empty: Any) -> None:
        """Give an empty batch to ranks that have none of their own."""
        if self._session.store is not None:
            try:
                publish(self._session.store, self._key, batch if empty is _NOTHING else empty)
            except JoinError:  # published too, for ranks that ask for a batch
                if empty is _NOTHING and not self.membership.even:
                    raise

    def _from_other_rank(self, device: torch.device) -> Any:
        """Return the empty batch of a rank that had one: it has published that before its first step began."""
        store: Any = self._session.store
        self._session.detector.wait(
            lambda seconds: wait_for_keys(store, self._key, seconds), "publishing an empty batch"
        )
        return fetch(store, self._key, device)


def _emptied_if_possible(example: Any) -> Any:
    try:
        return emptied(example)
    except JoinError:
        return example  # an empty one, as the user has said
