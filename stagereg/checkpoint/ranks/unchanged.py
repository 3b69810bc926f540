"""An exchange in which the ranks send large parts only if a part has changed on some rank.

The plan of a save, and the places at which the storage wrote each value, are large, and the same in every save of a
state that keeps its shapes. Each rank compares its parts with its parts of the previous save, and one all-reduce finds
out whether they differ on any rank. If they do, all ranks send all parts. Otherwise rank 0 uses the result of the
previous save, so its memory and time do not grow with the number of ranks and tensors.
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
    """One of the exchanges of a save. One thread at a time.

    Args:
        repeats: whether ranks may leave out unchanged parts; the same on all of them.
    """

    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self._sent: Sequence[Any] | None = None  # the parts of the previous save

    def forget(self) -> None:
        """Send all parts next time."""
        self._sent = None

    def round_trip(
        self,
        ranks: RankGroup,
        failing: str,
        act: Callable[[], tuple[V, Sequence[Any], Sequence[Any]]],
        answer: Callable[[Sequence[V], Sequence[Sequence[Any]] | None], Sequence[U]],
    ) -> U:
        """Do as :meth:`.RankGroup.round_trip`, whose other arguments these are. Collective.

        Args:
            act: returns a value that differs in every save; the parts that rarely change; and parts that go along with
                these when they are sent. Nothing may write a part afterwards.
            answer: gets the values of all ranks, and the parts of all ranks, equal ones as one object; ``None`` instead
                of the parts if they have changed on no rank.
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
    """Return the parts of all ranks, equal ones as one object."""
    if ranks == 1:
        return packed
    load = functools.cache(lambda part: pickle.loads(zlib.decompress(part)))
    return [[load(part) for part in parts] for parts in packed]
