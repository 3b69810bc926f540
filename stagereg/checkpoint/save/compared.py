"""The default for what several ranks hold: they compare all of it in each save, and the first of them writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stagereg.checkpoint.ranks.comparing import BufferNames, contents, expect_alike
from stagereg.checkpoint.targets import ReplicaSave, ReplicaSharding, Shards


class ComparedReplicas(ReplicaSharding):
    """Has ranks send checksums of all values with their plans. What differs under one name fails the save."""

    def __init__(self) -> None:
        self._buffers = BufferNames()

    def begin_save(self) -> ReplicaSave:
        return _ComparedSave(self._buffers)


class _ComparedSave(ReplicaSave):
    def __init__(self, buffers: BufferNames) -> None:
        super().__init__()
        self._names = buffers
        self._buffers: Collection[str] | None = None  # written by the training thread; ``None``: values are stale

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        self._buffers = None if follows else self._names.find(state, captured)
        return captured

    def post(self, objects: Collection[str]) -> Shards:
        found = {} if self._buffers is None else contents(self._entries, self._buffers, objects)
        return Shards(self._entries, {}, [*found.values()])

    def check(self, posts: Sequence[Any], order: Sequence[int]) -> None:
        expect_alike({rank: posts[rank] for rank in order})
