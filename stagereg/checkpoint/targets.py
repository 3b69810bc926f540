"""The protocols of what saves write to: targets with their schedules, and the sharding of replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.digests import Written
from stagereg.checkpoint.storage.protocol import Storage


class Schedule:
    """Saves at the positive multiples of ``every``, whatever saves cost.

    For the training thread, but :meth:`ended`, which may be called on any.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def __str__(self) -> str:
        """The option, as ranks compare it."""
        return str(self._every)

    def start(self, process_group: dist.ProcessGroup | None) -> None:
        """Begin, before the first of all other calls. Collective."""

    @property
    def every(self) -> int:
        return self._every

    def due(self, step: int) -> bool:
        """Whether to save after ``step``. Called once a step; the same on all ranks; not collective."""
        return step > 0 and step % self._every == 0

    def held(self, step: int, seconds: float) -> None:
        """Take notice of what a save has held the training loop for. Collective: all ranks, also those that failed."""

    def ended(self, age: float | None) -> None:
        """Take notice of how old a state was when its checkpoint was complete, ``None`` for lost."""

    def restored(self, step: int) -> None:
        """Go on from ``step``. On all ranks."""


ReadBack: TypeAlias = Callable[[Storage, str, bytes, Mapping[str, int], Mapping[Written, int]], None]
"""Compares what a storage has written with what it was given, as :func:`stagereg.checkpoint.load.read_back.read_back`.
"""


class SaveTarget(ABC):
    """Where a staged copy is written: the checkpoint directory, a local tier.

    A save goes to several targets, and each has a thread of its own, which calls these methods. They are called in the
    order in which they stand here, on all ranks of the target. No method is collective unless its docstring says so.

    Attributes:
        where: its directory or URL, for messages.
        ranks: the ranks that save together, in a group that no other thread uses.
        storage: writes the files.
        schedule: says at which steps the target gets a save.
        required: a failure fails the save. Otherwise a failure after all ranks have staged is a warning.
        repeats: the storage writes the same metadata again for the same plan and results, so that ranks need not send
            them again.
        read_back: reads the first save back before it is committed; ``None`` for a storage that is trusted.
        committed: on rank 0 the newest checkpoint that this run has committed there; ``None`` in a tier.
    """

    committed: Checkpoint | None = None
    required = True
    read_back: ReadBack | None = None

    def __init__(self, where: str, ranks: RankGroup, storage: Storage, schedule: Schedule, repeats: bool) -> None:
        self.where, self.ranks, self.storage, self.schedule, self.repeats = where, ranks, storage, schedule, repeats

    def names(self, path: str) -> bool:
        """Return whether ``path`` is that of a checkpoint in this target. Training thread."""
        return False

    @abstractmethod
    def begin(self, step: int) -> tuple[str, bool]:
        """Begin a save; return the path to write in, and whether all ranks skip this save. Collective."""

    def expect_new(self, path: str) -> None:  # noqa: B027  # a tier makes it at once
        """Raise ``CheckpointError`` if ``path`` has files of others. On each rank, before it makes ``path``."""

    def expect_room(self, nbytes: int) -> None:  # noqa: B027  # usually it is not known
        """Raise ``OSError`` if ``nbytes`` of each rank are known not to fit. On each rank."""

    @abstractmethod
    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return size and checksum of each file that this rank has written. On each rank; on rank 0 in the commit."""

    @abstractmethod
    def finish(
        self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]
    ) -> Mapping[str, FileDigest]:
        """Write what the storage writes last; ``None`` if that is as in the save before. On rank 0.

        Returns the digests that the storage does not have.
        """

    @abstractmethod
    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        """Make a checkpoint of what all ranks have written. On rank 0."""

    def complete(self, step: int) -> None:  # noqa: B027  # usually nothing is
        """Do what is left to do once it is one. On each rank; raises nothing."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Delete what was written: the save has failed. On each rank."""

    def clear(self) -> None:  # noqa: B027  # a tier keeps no more than it should
        """Delete what is no longer retained. On each rank, after each save, which has ended by then."""


class Part(NamedTuple):
    """Where what a rank has of a tensor lies in the whole."""

    offset: torch.Size
    whole: torch.Size


@dataclass(frozen=True)
class Shards:
    """What one rank writes of a copy.

    Attributes:
        entries: the entries of the copy, in which slices may replace tensors.
        parts: where such a tensor lies in the whole, by its dotted name; ``None`` for one that another rank writes.
        post: what rank 0 checks of it (:meth:`ReplicaSave.check`); can be pickled.
    """

    entries: dict[str, Any]
    parts: Mapping[str, Part | None]
    post: Any = None


@dataclass(frozen=True)
class Question:
    """What one rank sends if the ranks have to compare before they can write. Both parts can be pickled.

    Attributes:
        post: differs in every save.
        lasting: is the same in most saves, and is not sent again then.
    """

    post: Any
    lasting: Any


class ReplicaSave:
    """Which tensors that several ranks hold this rank writes in one save. Here: all of its own, as for one rank.

    Of a tensor that several ranks write, the planner has the first one write it, as torch's planner does: by name and
    layout, without comparing values. No method is collective:
    the exchange of the save carries what they return. :meth:`stage` is called on the training thread, the other methods
    on the thread of the first target, in the order in which they stand here.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}  # written by the thread of the first target

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        """Return what this rank stages of captured entries. ``follows``: it has left its loop, and is stale."""
        return captured

    def cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        """Return the entries that this rank writes of the staged copy, as far as that is known."""
        self._entries = copy
        return copy

    def post(self, objects: Collection[str]) -> Shards | Question:
        """Return what this rank writes, or what the ranks compare before: all ranks do either.

        ``objects`` are the dotted names of values that JSON cannot carry.
        """
        return Shards(self._entries, {})

    def answer(self, posts: Sequence[Any], lasting: Sequence[Any]) -> Sequence[Any]:
        """Return the answer to the question of each rank. On rank 0."""
        raise NotImplementedError

    def take(self, answer: Any) -> Shards:
        """Return what this rank writes, by the answer that it got."""
        raise NotImplementedError

    def check(self, posts: Sequence[Any], order: Sequence[int]) -> None:
        """Raise ``RankMismatchError`` if what ranks would write does not fit together. On rank 0.

        ``posts`` are in rank order; in ``order`` the ranks come first whose values go before others'.
        """

    def ended(self, error: BaseException | None) -> None:
        """All ranks know what they write, or skip the save; or ``error`` kept a rank from it."""


class ReplicaSharding(Protocol):
    """Decides which rank writes what several ranks hold identically. For all saves of a checkpointer."""

    def begin_save(self) -> ReplicaSave:
        """Return what the next save does. On any thread; in one order on all ranks."""
        ...
