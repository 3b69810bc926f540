"""The protocols of the destinations of saves: targets with their schedules, and the sharding of replicas."""

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

    For the training thread, except :meth:`ended`, which any thread may call.
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
        """Record how long a save has blocked the training loop. Collective: all ranks, also ranks that failed."""

    def ended(self, age: float | None) -> None:
        """Record how old a state was when its checkpoint was complete; ``None`` if the save failed."""

    def restored(self, step: int) -> None:
        """Resume from ``step``. On all ranks."""


ReadBack: TypeAlias = Callable[[Storage, str, bytes, Mapping[str, int], Mapping[Written, int]], None]
"""Compares written files with the values given to a storage, as :func:`stagereg.checkpoint.load.read_back.read_back`.
"""


class SaveTarget(ABC):
    """A destination of staged copies: the checkpoint directory, or a local tier.

    A save goes to several targets, and each has its own thread, which calls these methods in the order in which they
    are listed here, on all ranks of the target. No method is collective unless its docstring says so.

    Attributes:
        where: its directory or URL, for messages.
        ranks: the ranks that save together, in a group that no other thread uses.
        storage: writes the files.
        schedule: decides at which steps the target gets a save.
        required: whether a failure fails the save. Otherwise a failure after all ranks have staged is a warning.
        repeats: whether the storage writes the same metadata again for the same plan and results, so that ranks need
            not send them again.
        read_back: reads the first save back before it is committed; ``None`` for a storage that is trusted.
        committed: on rank 0 the newest checkpoint that this run has committed there; ``None`` in a tier.
    """

    committed: Checkpoint | None = None
    required = True
    read_back: ReadBack | None = None

    def __init__(self, where: str, ranks: RankGroup, storage: Storage, schedule: Schedule, repeats: bool) -> None:
        self.where, self.ranks, self.storage, self.schedule, self.repeats = where, ranks, storage, schedule, repeats

    def names(self, path: str) -> bool:
        """Return whether ``path`` is the path of a checkpoint in this target. Training thread."""
        return False

    @abstractmethod
    def begin(self, step: int) -> tuple[str, bool]:
        """Begin a save; return the path to write in, and whether all ranks skip this save. Collective."""

    def expect_new(self, path: str) -> None:  # noqa: B027  # a tier creates the path at once
        """Raise ``CheckpointError`` if ``path`` has other files. On each rank, before it creates ``path``."""

    def expect_room(self, nbytes: int) -> None:  # noqa: B027  # the free space is usually unknown
        """Raise ``OSError`` if ``nbytes`` of each rank are known not to fit. On each rank."""

    @abstractmethod
    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return size and checksum of each file that this rank has written. On each rank; on rank 0 in the commit."""

    @abstractmethod
    def finish(
        self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]
    ) -> Mapping[str, FileDigest]:
        """Write the last files of the storage; ``None`` if they equal those of the previous save. On rank 0.

        Returns the digests that the storage does not have.
        """

    @abstractmethod
    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        """Make a checkpoint of the files that all ranks have written. On rank 0."""

    def complete(self, step: int) -> None:  # noqa: B027  # usually there is no such work
        """Do the remaining work after the commit. On each rank; raises nothing."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Delete the written files: the save has failed. On each rank."""

    def clear(self) -> None:  # noqa: B027  # a tier has nothing to delete here
        """Delete checkpoints that are no longer retained. On each rank, after each save has ended."""


class Part(NamedTuple):
    """The position of a rank's shard in the whole tensor."""

    offset: torch.Size
    whole: torch.Size


@dataclass(frozen=True)
class Shards:
    """The portion of a copy that one rank writes.

    Attributes:
        entries: the entries of the copy, in which slices may replace tensors.
        parts: the offsets of such a tensor in the whole, by its dotted name; ``None`` if another rank writes it.
        post: the value that rank 0 checks (:meth:`ReplicaSave.check`); can be pickled.
    """

    entries: dict[str, Any]
    parts: Mapping[str, Part | None]
    post: Any = None


@dataclass(frozen=True)
class Question:
    """The message of one rank if the ranks must compare before they can write. Both parts can be pickled.

    Attributes:
        post: differs in every save.
        lasting: is the same in most saves, and is not sent again then.
    """

    post: Any
    lasting: Any


class ReplicaSave:
    """Decides which replicated tensors this rank writes in one save. Here: all of its own, as for one rank.

    If several ranks write a tensor, the planner assigns it to the first one, as torch's planner does: by name and
    layout, without comparing values. No method is collective:
    the exchange of the save carries their results. :meth:`stage` is called on the training thread, the other methods
    on the thread of the first target, in the order in which they are listed here.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}  # written by the thread of the first target

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        """Return the captured entries that this rank stages. ``follows``: it has left its loop, and is stale."""
        return captured

    def cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the staged copy that this rank writes, as far as they are known."""
        self._entries = copy
        return copy

    def post(self, objects: Collection[str]) -> Shards | Question:
        """Return the portion that this rank writes, or a question; all ranks return the same kind.

        ``objects`` are the dotted names of values that JSON cannot carry.
        """
        return Shards(self._entries, {})

    def answer(self, posts: Sequence[Any], lasting: Sequence[Any]) -> Sequence[Any]:
        """Return the answer to the question of each rank. On rank 0."""
        raise NotImplementedError

    def take(self, answer: Any) -> Shards:
        """Return the portion that this rank writes, from the answer that it got."""
        raise NotImplementedError

    def check(self, posts: Sequence[Any], order: Sequence[int]) -> None:
        """Raise ``RankMismatchError`` if the portions of the ranks do not fit together. On rank 0.

        ``posts`` are in rank order; ``order`` lists the ranks, those with precedence first.
        """

    def ended(self, error: BaseException | None) -> None:
        """Report that all ranks know their portions or skip the save; or ``error``, which kept a rank from it."""


class ReplicaSharding(Protocol):
    """Decides which rank writes replicated tensors. For all saves of a checkpointer."""

    def begin_save(self) -> ReplicaSave:
        """Return the object for the next save. On any thread; in one order on all ranks."""
        ...
