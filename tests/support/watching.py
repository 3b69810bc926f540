"""Hears of the moments of a save, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import stagereg.checkpoint.store.failpoints as failpoints


@contextmanager
def watching(observer: Callable[[str], object]) -> Iterator[None]:
    """In the block, have ``observer`` called with the name of each moment, where it comes."""
    before = failpoints.watch(observer)  # type: ignore[arg-type]
    try:
        yield
    finally:
        failpoints.watch(before)
