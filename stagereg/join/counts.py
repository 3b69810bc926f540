"""Counts the batches that a rank receives in a join, and checks the argument ``n`` of ``join.mean`` with the counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from stagereg.errors import JoinError
from stagereg.join.batches import Layout, parts_of, samples_in, with_parts

_log = logging.getLogger(__name__)

_COUNTS_AS_0 = (
    "stagereg: join.mean got n=%g on an empty batch, but this rank has received no samples since the last call, so n "
    "counts as 0.%s Take n from a tensor of the batch, such as len(x), or pass an empty batch with correct numbers: "
    "join.iterate(loader, example=...)."
)
_COUNTS_WITHOUT = (
    "stagereg: join.mean got n=%g on an empty batch. This is the number of samples since the last call, %d, plus, for "
    "each empty batch, %s from an earlier batch, so n counts as %d. Take n from a tensor of the batch, such as "
    "len(x), or pass an empty batch with correct numbers: join.iterate(loader, example=...)."
)
_COUNTS_IN_FULL = (
    "stagereg: join.mean got n=%g on an empty batch. This rank got %s samples since the last call, so n may be their "
    "number, and is used unchanged. If the loop accumulates n, make sure that it adds 0 for an empty batch."
)


class Given(NamedTuple):
    """The numbers of batches, of samples (``None``: unknown) and of empty batches that a rank has received."""

    batches: int = 0
    samples: int | None = 0
    empty: int = 0

    def since(self, before: Given) -> Given:
        """Return the difference between these counts and the earlier counts ``before``."""
        unknown = self.samples is None or before.samples is None
        samples = None if unknown else self.samples - before.samples  # type: ignore[operator]
        return Given(self.batches - before.batches, samples, self.empty - before.empty)


class SampleCounter:
    """Counts the batches that one rank receives in a join, and checks the program's ``n`` against the counts.

    ``given``: the counts of all batches so far. ``is_empty``: whether the last batch is empty. ``kept``: the nonzero
    numbers in the last empty batch, by path. They come from a batch with samples.
    """

    def __init__(self) -> None:
        self.given = Given()
        self.kept: dict[str, float] = {}
        self.is_empty = False
        self._calls: dict[Hashable, tuple[Given, Given]] = {}  # by line of the program: counts at its last 2 batches
        self._warned = False

    def add(self, batch: Any, layout: Layout | None = None) -> None:
        """Count a batch of this rank's data."""
        self.is_empty = False
        batches, samples, empty = self.given
        found = None if samples is None else samples_in(batch, layout)
        self.given = Given(batches + 1, None if samples is None or found is None else samples + found, empty)

    def add_empty(self, kept: dict[str, float]) -> None:
        """Count an empty batch. ``kept``: the numbers in it that come from a batch with samples, by path."""
        self.is_empty, self.kept = True, kept
        self.given = self.given._replace(empty=self.given.empty + 1)

    def counted(self, call: Hashable, n: float, read: Callable[[], float], over: str, trains: bool) -> float:
        """Return the ``n`` to use, when the program calls ``join.mean`` with ``n``. ``read`` returns the loss sum.

        A program that accumulates losses passes the ``n`` of several batches, and may do so on an empty batch. ``call``
        identifies the line of the call. ``over`` is the argument of ``join.mean``. ``trains``: whether the loss sum
        has a gradient.

        Raises:
            JoinError: ``n`` is neither 0 nor the number of samples since the last call, and may include a number that
                the empty batch retains from a batch with samples.
        """
        before, last = self._calls.get(call, (Given(), Given()))
        if last != self.given:  # not a second call on the same batch
            before = last
        self._calls[call] = before, self.given
        since = self.given.since(before)
        if not since.empty or not n:
            return n
        samples = "an unknown number of" if since.samples is None else since.samples
        total = read()
        has_loss = bool(total) and not math.isnan(total)
        # A constant n may happen to equal the number of all samples so far, but then the loss of an empty batch is 0.
        known = {each.samples for each in ((since, self.given) if has_loss else (since,)) if each.samples}
        if known & {n, total} and (has_loss or n not in self.kept.values()):
            return n
        if over != "samples":
            if self.kept and has_loss:
                self._warn(_COUNTS_IN_FULL, n, samples)
            return n
        kept = ", ".join(f"{place} = {value:g}" for place, value in self.kept.items())
        if not has_loss or (trains and not since.batches):
            self._warn(_COUNTS_AS_0, n, f" The empty batch has {kept} from an earlier batch." if kept else "")
            return 0.0
        for place, value in self.kept.items():
            if since.samples and n == since.samples + since.empty * value:
                self._warn(_COUNTS_WITHOUT, n, since.samples, f"{place} = {value:g}", since.samples)
                return float(since.samples)
        if kept:
            raise JoinError(
                f"join.mean got n={n:g} on an empty batch. This rank got {samples} samples since the last call, and "
                f"the empty batch has {kept} from an earlier batch, so n may count samples twice. Take n from "
                "a tensor of the batch, such as len(x), or pass an empty batch with correct numbers: "
                "join.iterate(loader, example=...)."
            )
        self._warn(_COUNTS_IN_FULL, n, samples)
        return n

    def _warn(self, text: str, *args: Any) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(text, *args)


class Index:
    """Continues, on empty batches, the index that wrappers such as ``enumerate`` add to batches.

    An integer item of a batch counts as an index if it increases by one per batch, and either starts at 0 or 1, or has
    increased for three batches. After a single batch, only the first item of a pair counts. If the loader is an
    ``enumerate`` object, the index may start at any number.
    """

    def __init__(self, loader: Any) -> None:
        self._is_enumerated = isinstance(loader, enumerate)
        self._first: dict[Any, int] = {}  # indices in the first batch, by key
        self._next = 0

    def add(self, batch: Any) -> None:
        """Update the candidates for an index with the next batch."""
        if self._next and not self._first:
            return
        found = {key: part for key, part in parts_of(batch).items() if type(part) is int}
        first = self._first if self._next else found
        self._first = {key: value for key, value in first.items() if found.get(key) == value + self._next}
        self._next += 1

    def continued(self, empty: Any) -> Any:
        """Return the empty batch with the next value of its index."""
        if not self._next:  # this rank had no batch: use the index of the other rank's batch
            self.add(empty)
            self._next = 0
        self._first = {key: first for key, first in self._first.items() if self._is_index(key, first, empty)}
        indices = {key: first + self._next for key, first in self._first.items()}
        self._next += 1
        return with_parts(empty, parts_of(empty) | indices) if indices else empty

    def _is_index(self, key: Any, first: int, batch: Any) -> bool:
        is_pair = key == 0 and type(batch) is tuple and len(batch) == 2
        if is_pair and self._is_enumerated:
            return True
        return self._next > 2 or (first in (0, 1) and (self._next == 2 or is_pair))

    @property
    def places(self) -> set[str]:
        """The paths of the indices in a batch, in the form that messages print."""
        return {f"batch[{key!r}]" for key in self._first}
