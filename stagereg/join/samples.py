"""How much a rank has been given by the loops of one join: batches, and the samples in them.

The samples of a batch are the length of the first dimension of its first tensor or array. This is counted at every
step, so the search for that tensor looks at little: a batch that hides it well has an unknown number of samples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["SampleCounter", "samples_in"]

_DEPTH = 4
_WIDTH = 8
"""Of a container, how many parts are looked at, and how deep."""
_LEAVES = (str, bytes, int, float, type(None))
"""What needs no closer look, and is what many parts are."""


class SampleCounter:
    """What one rank was given by the loops of one join; empty batches that keep it in step are not given.

    Attributes:
        batches: how many.
        samples: in all of them; ``None`` if that is not known of some batch, or if there was no loop.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.samples: int | None = None

    def count(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield what ``loader`` does, and count it."""
        for batch in loader:
            self.add(batch)
            yield batch

    def add(self, batch: Any) -> None:
        """Count a batch."""
        known = self.samples if self.batches else 0
        self.batches += 1
        if known is not None:
            found = samples_in(batch)
            self.samples = None if found is None else known + found


def samples_in(batch: Any) -> int | None:
    """Return how many samples a batch has, of whatever type it is; ``None`` if that cannot be told. Never raises."""
    try:
        return _samples_in(batch, _DEPTH)
    except Exception:  # containers are of anybody's making
        return None


def _samples_in(thing: Any, depth: int) -> int | None:
    if isinstance(thing, torch.Tensor):
        return thing.size(0) if thing.dim() else None
    if isinstance(thing, PackedSequence):  # its tensor has the steps of all sequences
        return int(thing.batch_sizes[0])
    numpy = sys.modules.get("numpy")  # not imported: no arrays
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return int(thing.shape[0]) if thing.ndim else None
    if depth and not isinstance(thing, _LEAVES):
        for part in islice(_parts(thing), _WIDTH):
            if (found := _samples_in(part, depth - 1)) is not None:
                return found
    return None


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (list, tuple)):
        return thing
    if dataclasses.is_dataclass(thing):
        return (getattr(thing, field.name) for field in dataclasses.fields(thing))
    return ()
