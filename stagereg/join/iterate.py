"""A loop whose body runs on every rank for as long as any rank has data.

A rank out of data asks, before each step, whether it begins anywhere, and if so its body gets an empty batch. The
body's forward is no announcement then. What is announced is a forward, not a batch: a batch that the body skips is no
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from stagereg.errors import JoinError
from stagereg.join.batches import SampleCounter, emptied, fetch, publish
from stagereg.join.session import EnteredLoop, JoinSession
from stagereg.kernel.channel import wait_for_keys

__all__ = ["Loop"]


class Loop(EnteredLoop):
    """One loop over a loader, on one rank.

    Args:
        session: of its join.
        loader: this rank's batches.
        counter: counts this rank's batches.

    Attributes:
        running: whether its generator has begun, and has neither ended nor been closed.
    """

    def __init__(self, session: JoinSession, loader: Iterable[Any], counter: SampleCounter) -> None:
        if session.foreign:
            raise JoinError(
                f"join.iterate needs a first joinable that announces through stagereg's Join, but {session.foreign} "
                "does so through torch's. Put the model first."
            )
        super().__init__(session, loader)
        self.running = False
        self._loader = loader
        self._counter = counter
        session.loop = self

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
        session = self._session
        empty = None if example is None else _emptied_if_possible(example)
        batch = None
        for i, batch in enumerate(self._loader):
            if i == 0 and empty is None and not self.membership.even:  # some rank may never have a batch
                publish(self.store, "example", batch)
            session.awaits_step = True
            self._counter.add(batch)
            yield batch
        session.awaits_step = False
        membership = self.membership
        while membership.wait_for_next_step() is not None:
            if empty is None:
                empty = self._from_other_rank(device) if batch is None else emptied(batch)
            batch = None  # so that its memory can be freed
            membership.expects_empty_step = True
            membership.empty = session.awaits_step = True
            yield _emptied_if_possible(empty)  # anew each time: the body may take its items out
            membership.empty = False
            if membership.expects_empty_step:  # the body has skipped it, so it also calls no join.mean
                self.shadow_step()
        self.close()

    def _from_other_rank(self, device: torch.device) -> Any:
        """Return the empty batch of a rank that had one: it has published that before its first step began."""
        if self.membership.even:
            raise JoinError(
                f"the loader of every rank has a length of {self._length}, but that of this rank gave no batch at all, "
                "so it is not known what an empty one is: join.iterate(loader, example=...)"
            )
        wait = self._session.detector.wait
        wait(lambda seconds: wait_for_keys(self.store, "example", seconds), "publishing an empty batch")
        return fetch(self.store, "example", device)


def _emptied_if_possible(example: Any) -> Any:
    try:
        return emptied(example)
    except JoinError:
        return example  # an empty one, as the user has said
