"""The protocols by which extensions plug into a checkpointer.

The core calls what is written here, and knows nothing else of extensions. All extensions of a checkpointer are called
in one order, the same on all ranks. What one raises in :meth:`CheckpointExtension.start`, ``due``, ``candidates`` or
``restoring`` reaches the program. What it raises in any other method is logged, and fails neither a save nor training.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from stagereg.checkpoint.format.manifest import Checkpoint
    from stagereg.checkpoint.ranks.rank_group import RankGroup
    from stagereg.checkpoint.store.checkpoint_store import CheckpointStore


class Due(enum.IntEnum):
    """What is to happen after a step. Of several answers the largest one counts."""

    NO = 0
    SAVE = 1
    LEAVE = 2  # save, and exit on all ranks


@dataclass(frozen=True)
class Run:
    """What an extension may know of the checkpointer that it accompanies."""

    ranks: RankGroup
    store: CheckpointStore  # the checkpoint directory
    token: str  # of this run
    resume: str  # the option
    timeout_s: float  # of a save


@dataclass
class Candidate:
    """A checkpoint that a restore may try.

    Attributes:
        path: its directory, a path or a URL.
        checkpoint: what its manifest says; ``None`` if that cannot be read.
        source: where it is read from.
        rejections: why it is not tried, by extension or file; empty if it is.
    """

    path: str
    checkpoint: Checkpoint | None
    source: CheckpointSource
    rejections: dict[str, str]


class SaveObserver:
    """Observes what one rank saves. Each method does nothing here.

    All methods are called on the training thread, and must neither wait nor be collective. What one raises is logged.
    """

    def given(self, state: Mapping[str, Any]) -> None:
        """The program has given a state, which is kept for saves; objects in containers are entries of their own."""

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        """A step has ended, with the state that was given for it, ``None`` if that was given earlier."""

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        """The program saves ``step`` in ``targets``; ``state`` is its own dict, ``None`` if it never gave one."""

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        """Entries of a state are ``captured``, and about to be staged.

        Return what is to be called with the staged copy, on the thread of the save.
        """
        return None


class CheckpointExtension(SaveObserver):
    """Accompanies one checkpointer on all ranks. Each method does nothing here. See the module for errors."""

    name = ""

    def start(self, run: Run) -> None:
        """The checkpointer is constructed. Collective; training thread."""

    def due(self, step: int) -> Due:
        """Return whether to save after ``step``: the same on all ranks. Training thread, once a step."""
        return Due.NO

    def candidates(self, listed: list[Candidate]) -> list[Candidate]:
        """Add, reorder or reject candidates of a restore. On rank 0, training thread."""
        return listed

    def restoring(self, chosen: Candidate) -> None:
        """A checkpoint is about to be read. On all ranks, not collective; training thread."""

    def restored(self, chosen: Candidate | None) -> None:
        """A restore has ended; ``None``: there was nothing to restore. On all ranks; training thread."""

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        """Return what the manifest of a checkpoint has of this extension, as JSON. On rank 0; a save's thread."""
        return {}

    def committed(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete. On rank 0; a save's thread, which waits for this."""

    def ending(self, error: BaseException | None) -> None:
        """The ``with`` block of the checkpointer ends; it may still save. On all ranks; training thread."""

    def close(self, in_time: bool) -> None:
        """The checkpointer is closed; ``in_time`` unless a save hangs. Training thread; idempotent."""


class SaveTarget(Protocol):
    """Where one staged copy is written. A save goes to several targets, each with a thread of its own."""

    ranks: RankGroup
    where: str
    required: bool  # a failure fails the save; else it is logged


class CheckpointSource(Protocol):
    """Where checkpoints are restored from: the checkpoint directory, a local tier, a directory of plain torch."""

    def list(self, resume: str) -> list[Candidate]:
        """Return what there is, the newest first. On rank 0."""
        ...

    def files(self, of: Candidate) -> AbstractContextManager[Any]:
        """Return the files of a candidate, opened. On each rank."""
        ...


class ReplicaSharding(Protocol):
    """Which rank writes what several ranks hold identically. The default shards nothing."""

    def cut(self, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], Any] | None:
        """Return this rank's shards of entries; ``None`` if ranks have to compare first. Not collective."""
        ...

    def compare(self, ranks: RankGroup, number: int, entries: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return this rank's shards after a comparison with the other ranks. Collective; a save's thread."""
        ...

    def ended(self, number: int, error: BaseException | None) -> None:
        """A save has ended, well or not. A save's thread."""
        ...


def largest(answers: Sequence[Due]) -> Due:
    """Return the answer that counts."""
    return max(answers, default=Due.NO)
