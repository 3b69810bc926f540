"""All errors that led to one: what it was raised from, what was being handled, and those that torch has wrapped."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["causes"]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and every error behind it, once each; those of the ranks first, where torch has wrapped them."""
    yield from _unseen(error, set())


def _unseen(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    wrapped = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    for other in (*wrapped, error.__cause__, error.__context__):
        yield from _unseen(other, seen)
