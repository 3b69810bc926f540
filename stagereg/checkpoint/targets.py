"""The protocols of save targets, of their schedules, and of the sharding of replicated tensors."""

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
    """A schedule that saves at the positive multiples of ``every``.

    Only the training thread may call the methods, except :meth:`ended`, which any thread may call.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def __str__(self) -> str:
        """Return the option in the form that ranks compare."""
        return str(self._every)

    def start(self, process_group: dist.ProcessGroup | None) -> None:
        """Start the schedule, before any other call. Collective."""

    @property
    def every(self) -> int:
        return self._every

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``; the same on all ranks. Called once per step. Not collective."""
        return step > 0 and step % self._every == 0

    def held(self, step: int, seconds: float) -> None:
        """Record how long a save has blocked the training loop. Collective, also for ranks whose save failed."""

    def ended(self, age: float | None) -> None:
        """Record the age of a state, in seconds, when its checkpoint was complete; ``None`` if the save failed."""

    def restored(self, step: int) -> None:
        """Resume from ``step``. On all ranks."""


ReadBack: TypeAlias = Callable[[Storage, str, bytes, Mapping[str, int], Mapping[Written, int]], None]
"""The type of :func:`stagereg.checkpoint.load.read_back.read_back`, which checks the files that a storage wrote."""


class SaveTarget(ABC):
    """A destination of saves: the checkpoint directory or a local tier.

    A save goes to one or more targets. Each target has its own thread, which calls these methods in the order of their
    definition, on all ranks of the target. The docstring of each collective method contains "Collective".

    Attributes:
        where: the directory or URL, for messages.
        ranks: the ranks that save together, in a group that no other thread uses.
        storage: the storage that writes the files.
        schedule: decides at which steps a save goes to the target.
        required: whether a failure in this target fails the save. If False, a failure after all ranks have staged is
            only logged as a warning.
        repeats: whether the storage writes the same metadata for the same plan and results, so that ranks need not send
            unchanged plans and results again.
        read_back: reads the first save back before its commit; ``None`` for a trusted storage.
        committed: on rank 0, the newest checkpoint that this run has committed to the target; ``None`` for a tier.
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
        """Begin a save; return the directory to write to, and whether all ranks skip this save. Collective."""

    def expect_new(self, path: str) -> None:  # noqa: B027  # a tier creates the path itself
        """Raise ``CheckpointError`` if ``path`` already has files. On each rank, before it creates ``path``."""

    def expect_room(self, nbytes: int) -> None:  # noqa: B027  # the free space is usually unknown
        """Raise ``OSError`` if the target is known to have no space for ``nbytes`` of each rank. On each rank."""

    @abstractmethod
    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return the digests of the files that this rank has written. On each rank; rank 0 calls it in the commit."""

    @abstractmethod
    def finish(
        self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]
    ) -> Mapping[str, FileDigest]:
        """Write the last files of the storage; return the digests of files that the storage did not write. On rank 0.

        ``metadata`` is ``None`` if it is the same as in the previous save.
        """

    @abstractmethod
    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        """Commit the files that all ranks have written as a checkpoint. On rank 0."""

    def complete(self, step: int) -> None:  # noqa: B027  # usually there is no such work
        """Do the remaining work after the commit. On each rank. Raises nothing."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Delete the files of a failed save. On each rank."""

    def clear(self) -> None:  # noqa: B027  # a tier has nothing to delete here
        """Delete checkpoints that are no longer retained. On each rank, after each save has ended."""


class Part(NamedTuple):
    """The position of a rank's shard in the whole tensor."""

    offset: torch.Size
    whole: torch.Size


@dataclass(frozen=True)
class Shards:
    """The portion of a staged copy that one rank writes.

    Attributes:
        entries: the entries of the copy; slices replace tensors that this rank writes in part.
        parts: the positions of these slices, by the dotted name of the tensor; ``None`` if another rank writes it.
        post: a picklable value that :meth:`ReplicaSave.check` checks on rank 0.
    """

    entries: dict[str, Any]
    parts: Mapping[str, Part | None]
    post: Any = None


@dataclass(frozen=True)
class Question:
    """The message of one rank if the ranks must compare values before they can write. Both parts are picklable.

    Attributes:
        post: the part that differs in every save.
        lasting: the part that is the same in most saves; ranks send it only when it has changed.
    """

    post: Any
    lasting: Any


class ReplicaSave:
    """Decides which replicated tensors this rank writes in one save. By default this rank writes all of its tensors.

    If several ranks write a tensor, the planner assigns it to the first one, as torch's planner does: by name and
    layout, without comparing values. No method is collective: the exchange of the save sends their results.
    :meth:`stage` is called on the training thread, the other methods on the thread of the first target, in the order of
    their definition.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}  # written by the thread of the first target

    def stage(self, state: Mapping[str, Any], captured: dict[str, Any], follows: bool) -> dict[str, Any]:
        """Return the captured entries that this rank stages; ``follows``: the rank has left its loop, and is stale."""
        return captured

    def cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of the staged copy that this rank writes, as far as known before the exchange."""
        self._entries = copy
        return copy

    def post(self, objects: Collection[str]) -> Shards | Question:
        """Return the portion that this rank writes, or a question; all ranks return the same type.

        ``objects`` are the dotted names of values that JSON cannot represent.
        """
        return Shards(self._entries, {})

    def answer(self, posts: Sequence[Any], lasting: Sequence[Any]) -> Sequence[Any]:
        """Return the answer to the question of each rank. On rank 0."""
        raise NotImplementedError

    def take(self, answer: Any) -> Shards:
        """Return the portion that this rank writes, after the answer to its question."""
        raise NotImplementedError

    def check(self, posts: Sequence[Any], order: Sequence[int]) -> None:
        """Raise ``RankMismatchError`` if the portions of the ranks do not fit together. On rank 0.

        ``posts`` are in rank order; ``order`` lists the ranks by descending precedence.
        """

    def ended(self, error: BaseException | None) -> None:
        """Report that all ranks know their portions or skip the save, or the ``error`` that prevented this."""


class ReplicaSharding(Protocol):
    """Decides which rank writes replicated tensors, in all saves of a checkpointer."""

    def begin_save(self) -> ReplicaSave:
        """Return the object for the next save. Any thread; called in the same order on all ranks."""
        ...
