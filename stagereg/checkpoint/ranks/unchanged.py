"""An exchange between ranks that omits large objects if they have not changed since the previous save.

The plan of a save, and the file offsets of its values, are large objects, but do not change while the shapes of the
state do not change. Each rank compares its objects, here called *parts*, with the previous save. One all-reduce
determines whether a part has changed on any rank. If so, all ranks send all parts. Otherwise rank 0 reuses its result
from the previous save, so the memory and time of rank 0 do not grow with the number of ranks and tensors.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.kernel.copier import no_collection

U = TypeVar("U")
V = TypeVar("V")


class Exchange:
    """Exchanges values and parts between the ranks in each save. Not thread-safe.

    ``repeats``: whether ranks may omit unchanged parts. Must be the same on all ranks.
    """

    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self._sent: Sequence[Any] | None = None  # this rank's parts in the previous save

    def forget(self) -> None:
        """Forget the previous save, so that the next exchange sends all parts."""
        self._sent = None

    def round_trip(
        self,
        ranks: RankGroup,
        failing: str,
        act: Callable[[], tuple[V, Sequence[Any], Sequence[Any]]],
        answer: Callable[[Sequence[V], Sequence[Sequence[Any]] | None], Sequence[U]],
    ) -> U:
        """Call :meth:`.RankGroup.round_trip`, which documents ``failing`` and the errors. Collective.

        Args:
            act: returns three things: a value, which is always sent; parts, which are sent only if they have changed on
                a rank; and further parts, which are sent together with the parts. Parts must not be modified later.
            answer: called on rank 0 with the values of all ranks, and the parts of all ranks (``None`` if no part has
                changed). Equal parts of several ranks are the same object.
        """
        acted: Future[tuple[V, Sequence[Any], Sequence[Any]]] = Future()
        is_known = False
        try:
            given = act()
            is_known = self._repeats and given[1] == self._sent
            acted.set_result(given)
        except BaseException as error:  # ``post`` raises it, so that all ranks make the same collective calls
            acted.set_exception(error)
        changed = ranks.any(failing, not is_known)

        def post() -> tuple[V, Sequence[Any] | None]:
            value, lasting, more = acted.result()
            return value, pack([*lasting, *more], ranks.size) if changed else None

        @no_collection()
        def reply(posts: Sequence[tuple[V, Sequence[Any] | None]]) -> Sequence[U]:
            values = [value for value, _ in posts]
            return answer(values, unpack([parts or () for _, parts in posts], ranks.size) if changed else None)

        answered = ranks.round_trip(failing, post, reply)
        self._sent = acted.result()[1]
        return answered


def pack(parts: Sequence[Any], ranks: int) -> Sequence[Any]:
    return parts if ranks == 1 else [zlib.compress(pickle.dumps(part), 1) for part in parts]


def unpack(packed: Sequence[Sequence[Any]], ranks: int) -> Sequence[Sequence[Any]]:
    """Return the parts of all ranks. Equal parts become the same object."""
    if ranks == 1:
        return packed
    load = functools.cache(lambda part: pickle.loads(zlib.decompress(part)))
    return [[load(part) for part in parts] for parts in packed]
