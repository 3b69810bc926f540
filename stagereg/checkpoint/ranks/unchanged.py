"""An exchange in which a rank sends only a checksum of what has not changed since the save before.

What a rank would write, and where its storage has put it, is large and the same in every save of a state that keeps its
shapes. Rank 0 keeps a checksum of each rank's, and what came of all of them together, so its memory and time do not
grow with the number of ranks and tensors. If a rank has something new, or nothing to go by, as after a save that has
failed, of which all ranks forget what they sent, rank 0 asks all to send everything once more.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from stagereg.checkpoint.format.encoding import without_gc
from stagereg.checkpoint.ranks.rank_group import RankGroup

U = TypeVar("U")
V = TypeVar("V")


class Post(NamedTuple):
    """What a rank sends."""

    varying: Any  # what is another in each save
    digest: bytes = b""  # of what hardly ever is
    packed: list[bytes] | None = None  # that itself, and more, part by part; ``None`` if it is as in the save before


class RepeatedExchange:
    """One of the exchanges of a save. One thread at a time.

    Args:
        possible: whether ranks may leave out what is as before; the same on all of them.
    """

    def __init__(self, possible: bool) -> None:
        self._possible = possible
        self._own = b""  # the checksum of what this rank has sent last
        self._pickled: list[tuple[Any, bytes]] = []  # of its parts
        self._all: list[bytes] = []  # of what each rank has, on rank 0

    def forget_sent(self) -> None:
        """Send everything next time."""
        self._own, self._pickled, self._all = b"", [], []

    def round_trip(
        self,
        ranks: RankGroup,
        failing: str,
        act: Callable[[], tuple[V, Sequence[Any], Sequence[Any]]],
        answer: Callable[[Sequence[V], Sequence[Sequence[Any]] | None], Sequence[U]],
    ) -> U:
        """As :meth:`.RankGroup.round_trip`, which has the arguments that are not here.

        Args:
            act: returns three things: what differs in every save; the parts that rarely change; and what is sent along
                with these when they are sent. A part that is the same object as in the save before has to be as it was.
            answer: is given the first of these, and all parts of the others, those that ranks have alike as one object;
                ``None`` if no rank has others than in the save before.
        """
        given: list[tuple[V, Sequence[Any], Sequence[Any]]] = []
        digests: list[bytes] = []

        def begin() -> bool:
            given.append(act())
            digests.append(self._digest(given[0][1]) if self._possible or ranks.size > 1 else b"")
            return self._possible and digests[0] == self._own

        def alone(acts: Sequence[bool]) -> Sequence[U]:
            varying, lasting, more = given[0]
            return answer([varying], None if acts[0] else [[*lasting, *more]])

        def send(whole: bool) -> Post:
            return self.post(*given[0]) if whole else Post(given[0][0], digests[0])

        if ranks.size == 1:
            answered = ranks.round_trip(failing, begin, alone)
            self._own = digests[0]
            return answered
        found = ranks.round_trip(failing, lambda: send(not begin()), lambda posts: self.reply(posts, answer))
        if found is None:
            found = ranks.round_trip(failing, lambda: send(True), lambda posts: self.reply(posts, answer))
        assert found is not None
        self._own = digests[0]
        return found

    def post(self, varying: Any, lasting: Sequence[Any], more: Sequence[Any]) -> Post:
        """Return all of what a rank has to send."""
        digest = self._digest(lasting)
        parts = [*(part for _, part in self._pickled), *map(pickle.dumps, more)]
        return Post(varying, digest, [zlib.compress(part, 1) for part in parts])

    def _digest(self, lasting: Sequence[Any]) -> bytes:
        """Return the checksum of what a rank has to send; of a part that is the one of last time nothing is done."""
        before = [*self._pickled, *[(self, b"")] * len(lasting)]
        self._pickled = [
            (part, data if part is known else pickle.dumps(part))
            for part, (known, data) in zip(lasting, before, strict=False)
        ]
        return hashlib.blake2b(b"".join(data for _, data in self._pickled), digest_size=16).digest()

    @without_gc()
    def reply(
        self,
        posts: Sequence[Post],
        answer: Callable[[Sequence[Any], Sequence[Sequence[Any]] | None], Sequence[U]],
    ) -> Sequence[U | None]:
        """Return what each rank gets on rank 0: an answer, or ``None`` if it has to send everything."""
        varying, digests = [each.varying for each in posts], [each.digest for each in posts]
        packed = [each.packed for each in posts if each.packed is not None]
        if len(packed) == len(posts):
            load = functools.cache(lambda part: pickle.loads(zlib.decompress(part)))
            found = answer(varying, [[load(part) for part in parts] for parts in packed])
        elif not packed and digests == self._all:
            found = answer(varying, None)
        else:
            return [None] * len(posts)
        self._all = digests
        return found
