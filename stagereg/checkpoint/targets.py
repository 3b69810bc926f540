"""Interfaces of save targets (destinations of checkpoints), of schedules, and of the sharding of replicated tensors."""

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
    """Decides at which steps to save: here at the positive multiples of ``every``. Subclasses may decide differently.

    Only the training thread calls the methods, except :meth:`ended`, which any thread may call.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def __str__(self) -> str:
        """Return the option ``every`` in the form in which ranks compare it."""
        return str(self._every)

    def start(self, process_group: dist.ProcessGroup | None) -> None:
        """Prepare the schedule. Called once, before any other method. Collective."""

    @property
    def every(self) -> int:
        return self._every

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``; equal on all ranks. Called once per step. Not collective."""
        return step > 0 and step % self._every == 0

    def held(self, step: int, seconds: float) -> None:
        """Record for how long a save has blocked the training loop. Collective, even if the save failed on a rank."""

    def ended(self, age: float | None) -> None:
        """Record the time in seconds from staging to the complete checkpoint, or ``None`` if the save failed."""

    def restored(self, step: int) -> None:
        """Record that the run has resumed from ``step``. Called on all ranks."""


ReadBack: TypeAlias = Callable[[Storage, str, bytes, Mapping[str, int], Mapping[Written, int]], None]
"""The type of :func:`stagereg.checkpoint.load.read_back.read_back`, which checks the files that a storage wrote."""


class SaveTarget(ABC):
    """A destination of saves: the checkpoint directory or a local tier.

    A save is written to one or more targets. Each target has its own thread. On every rank, the thread calls these
    methods in the order in which they are defined here. A collective method has the word "Collective" in its docstring.

    Attributes:
        where: the directory or URL, for messages.
        ranks: the ranks that save together, in a group that no other thread uses.
        storage: the storage that writes the files.
        schedule: decides at which steps a save goes to the target.
        repeats: whether the storage writes the same metadata for the same plan and results, so that ranks need not send
            unchanged plans and results again.
    """

    committed: Checkpoint | None = None  # on rank 0, the newest checkpoint that this run has committed to the directory
    required = True  # if False, a failure of this target after all ranks have staged is only a warning
    read_back: ReadBack | None = None  # checks the first checkpoint before the commit; ``None`` for a trusted storage

    def __init__(self, where: str, ranks: RankGroup, storage: Storage, schedule: Schedule, repeats: bool) -> None:
        self.where, self.ranks, self.storage, self.schedule, self.repeats = where, ranks, storage, schedule, repeats

    def names(self, path: str) -> bool:
        """Return whether ``path`` is a checkpoint in this target. Called on the training thread."""
        return False

    @abstractmethod
    def begin(self, step: int) -> tuple[str, bool]:
        """Begin a save. Return the directory to write to, and whether all ranks skip this save. Collective."""

    def expect_new(self, path: str) -> None:  # noqa: B027  # a tier creates the path itself
        """Raise ``CheckpointError`` if ``path`` already contains files. On each rank, before ``path`` is created."""

    def expect_room(self, nbytes: int) -> None:  # noqa: B027  # the free space is usually unknown
        """Raise ``OSError`` if the target is known to have less space than all ranks need. Called on each rank.

        ``nbytes``: the bytes that this rank will write.
        """

    @abstractmethod
    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return the digests of the files that this rank wrote. Called on each rank; on rank 0 during the commit."""

    @abstractmethod
    def finish(self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]) -> dict[str, FileDigest]:
        """Write the metadata files with the storage. Return the digests of all other new files. On rank 0.

        ``metadata`` is ``None`` if it has not changed since the previous save.
        """

    @abstractmethod
    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        """Commit the files that all ranks have written as a checkpoint. On rank 0."""

    def complete(self, step: int) -> None:  # noqa: B027  # usually there is no such work
        """Called on each rank after the commit, for example to send copies. Raises nothing."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Delete the files of a failed save. On each rank."""

    def clear(self) -> None:  # noqa: B027  # a tier has nothing to delete here
        """Delete checkpoints that are no longer retained. On each rank, after each save has ended."""


class Part(NamedTuple):
    """The position of a rank's shard in a replicated tensor."""

    offset: torch.Size  # index of the first element of the shard
    whole: torch.Size  # shape of the whole tensor


@dataclass(frozen=True)
class Shards:
    """The portion of a staged copy that one rank writes."""

    entries: dict[str, Any]  # if this rank writes only a slice of a tensor, the slice replaces the tensor
    # The positions of these slices, by the dotted name of the tensor; ``None`` for a tensor that another rank writes.
    parts: Mapping[str, Part | None]
    post: Any = None  # a picklable value, which rank 0 passes to :meth:`ReplicaSave.check`


@dataclass(frozen=True)
class Question:
    """A rank's message to rank 0, if the ranks must compare values before they write. Both fields are picklable."""

    post: Any  # the data that differs in every save
    lasting: Any  # the data that is the same in most saves; a rank sends it only after a change


class ReplicaSave:
    """Decides which replicated tensors this rank writes in one save. By default this rank writes all of its tensors.

    If several ranks write the same tensor, the planner assigns it to the first rank, as torch's planner does: by name
    and layout, without comparing values. The methods are not collective, because the save itself exchanges their
    results. :meth:`stage` is called on the training thread. The other methods are called on the thread of the first
    target, in the order in which they are defined here.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}  # written by the thread of the first target

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        """Return the entries that this rank stages. ``follows``: whether this rank has left its training loop."""
        return captured

    def cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        """Return the staged entries that this rank may write. Called before the ranks exchange messages."""
        self._entries = copy
        return copy

    def post(self, objects: Collection[str]) -> Shards | Question:
        """Return the portion that this rank writes, or a message for rank 0. All ranks return the same type.

        ``objects``: the dotted names of values that JSON cannot represent.
        """
        return Shards(self._entries, {})

    def answer(self, posts: Sequence[Any], lasting: Sequence[Any]) -> Sequence[Any]:
        """Return the reply to the :class:`Question` of each rank, in rank order. Called on rank 0."""
        raise NotImplementedError

    def take(self, answer: Any) -> Shards:
        """Return the portion that this rank writes, according to the reply ``answer`` from rank 0."""
        raise NotImplementedError

    def check(self, posts: Sequence[Any], order: Sequence[int]) -> None:
        """Raise ``RankMismatchError`` if the portions of the ranks contradict each other. Called on rank 0.

        ``posts``: :attr:`Shards.post` of each rank. ``order``: the ranks by descending precedence.
        """

    def ended(self, error: BaseException | None) -> None:
        """Called after the exchange. ``error``: why the ranks could not agree on their portions, or ``None``."""


class ReplicaSharding(Protocol):
    """Decides which rank writes replicated tensors, in all saves of a checkpointer."""

    def begin_save(self) -> ReplicaSave:
        """Return a new object for one save. Called on any thread, in the same order on all ranks."""
