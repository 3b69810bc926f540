"""An exchange in which the ranks send large parts only if a part has changed on some rank.

The plan of a save, and the positions at which the storage wrote each value, are large, but the same in every save of a
state whose shapes do not change. Each rank compares its parts with its parts of the previous save, and one all-reduce
determines whether they differ on any rank. If they do, all ranks send all parts. Otherwise rank 0 uses the result of
the previous save, so its memory and time do not grow with the number of ranks and tensors.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from stagereg.checkpoint.format.encoding import without_gc
from stagereg.checkpoint.ranks.rank_group import RankGroup

U = TypeVar("U")
V = TypeVar("V")


class Exchange:
    """An exchange between the ranks in each save. Not thread-safe.

    Args:
        repeats: whether ranks may omit unchanged parts; the same on all ranks.
    """

    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self._sent: Sequence[Any] | None = None  # the parts of the previous save

    def forget(self) -> None:
        """Send all parts in the next exchange."""
        self._sent = None

    def round_trip(
        self,
        ranks: RankGroup,
        failing: str,
        act: Callable[[], tuple[V, Sequence[Any], Sequence[Any]]],
        answer: Callable[[Sequence[V], Sequence[Sequence[Any]] | None], Sequence[U]],
    ) -> U:
        """Run :meth:`.RankGroup.round_trip`, which also documents the other arguments. Collective.

        Args:
            act: returns a value that differs in every save, the parts that rarely change, and further parts that are
                sent together with these. The parts must not be modified afterwards.
            answer: called with the values of all ranks and the parts of all ranks, or with ``None`` instead of the
                parts if no part has changed. Equal parts are one object.
        """
        acted: Future[tuple[V, Sequence[Any], Sequence[Any]]] = Future()
        is_known = False
        try:
            given = act()
            is_known = self._repeats and given[1] == self._sent
            acted.set_result(given)
        except BaseException as error:  # raised below, so that all ranks make the same calls
            acted.set_exception(error)
        changed = ranks.any(failing, not is_known)

        def post() -> tuple[V, Sequence[Any] | None]:
            value, lasting, more = acted.result()
            return value, pack([*lasting, *more], ranks.size) if changed else None

        @without_gc()
        def reply(posts: Sequence[tuple[V, Sequence[Any] | None]]) -> Sequence[U]:
            values = [value for value, _ in posts]
            return answer(values, unpack([parts or () for _, parts in posts], ranks.size) if changed else None)

        answered = ranks.round_trip(failing, post, reply)
        self._sent = acted.result()[1]
        return answered


def pack(parts: Sequence[Any], ranks: int) -> Sequence[Any]:
    return parts if ranks == 1 else [zlib.compress(pickle.dumps(part), 1) for part in parts]


def unpack(packed: Sequence[Sequence[Any]], ranks: int) -> Sequence[Sequence[Any]]:
    """Return the parts of all ranks; equal parts become one object."""
    if ranks == 1:
        return packed
    load = functools.cache(lambda part: pickle.loads(zlib.decompress(part)))
    return [[load(part) for part in parts] for parts in packed]
