"""One save, with its copy; where the saves of a checkpointer go; and what is kept of the last one.

A save is made by the call in the training loop (:mod:`.saver`), waits in the background (:mod:`.save_thread`), and is
written and committed there (:mod:`.committing`).
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

import stagereg.base.record as record
from stagereg.checkpoint.format.index import Readable
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.ranks.merging import Structures
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.unchanged import Exchange
from stagereg.checkpoint.save.schedule import Schedule
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.checkpoint.save.structure import Outline
from stagereg.checkpoint.storage.digests import Written
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, WrittenWhileSavedError, WrittenWhileStagedError
from stagereg.extensions.replicas.shares import ReplicaShards, Shares
from stagereg.stagers.async_stager import UnconfirmedCopy

ReadBack: TypeAlias = Callable[[Storage, str, bytes, Mapping[str, int], Mapping[Written, int]], None]
"""Compares what a storage has written with what it was given, as :func:`stagereg.checkpoint.load.read_back.read_back`.
"""


class LastSave:
    """What a rank keeps of its last save, so that in the next one it need not send again what has not changed."""

    def __init__(self, repeats: bool) -> None:
        self.plans, self.results = Exchange(repeats), Exchange(repeats)
        self.planner = StatePlanner()
        self.plan: SavePlan | None = None  # what this rank would have written
        self.sent: list[SavePlan] = []  # the same, as it is sent
        self.nbytes = 0  # of the tensors in it, without the states of generators
        self.dealt: SavePlan | None = None  # what it was told to write
        self.entries: Structures = {}  # on rank 0: those that ranks had
        self.finished = b""  # on rank 0: torch's metadata, as the storage has written it
        self.described = ""  # on rank 0: the tensors in the index
        self.readable = Readable()  # on rank 0: the index, as far as it is known that the reader accepts it

    def forget(self) -> None:
        """Send everything in the next save: this one has failed."""
        self.plans.forget()
        self.results.forget()
        self.entries = {}


class Target(ABC):
    """Where saves are written: the store, or the tier nearer than it.

    Attributes:
        where: its directory or URL.
        ranks: save together.
        storage: writes the files.
        schedule: says when.
        last: what this rank keeps of its last save there.
        required: a failure fails the save; if not, what fails there once all ranks have staged is a warning.
        read_back: is to read the next save back before it is committed, until one was.
    """

    required = True
    read_back: ReadBack | None = None

    def __init__(self, where: str, ranks: RankGroup, storage: Storage, schedule: Schedule, repeats: bool) -> None:
        self.where, self.ranks, self.storage, self.schedule = where, ranks, storage, schedule
        self.last = LastSave(repeats)

    @abstractmethod
    def begin(self, step: int) -> tuple[str, bool]:
        """Begin a save; return the path to write in, and whether all ranks skip this save."""

    def expect_new(self, path: str) -> None:  # noqa: B027  # a tier makes it at once
        """Raise ``CheckpointError`` if ``path`` has anything of others. On each rank, before it makes ``path``."""

    def expect_room(self, nbytes: int) -> None:  # noqa: B027  # usually it is not known
        """Raise ``OSError`` if it is known that so many bytes of each rank do not fit."""

    @abstractmethod
    def finish(
        self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]
    ) -> Mapping[str, FileDigest]:
        """Write what the storage writes last; ``None`` if that is as in the save before. On rank 0.

        Returns the marks that the storage does not have.
        """

    @abstractmethod
    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return size and checksum of each file that this rank has written."""

    @abstractmethod
    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        """Make a checkpoint of what all ranks have written. On rank 0."""

    def complete(self, step: int) -> None:  # noqa: B027  # usually nothing is
        """Do what is left to do once it is one. On each rank; raises nothing."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Delete what was written. On each rank."""

    def clear(self) -> None:  # noqa: B027  # a tier keeps no more than it should
        """Delete what is no longer kept. Called when a save has ended."""


@dataclass
class StagedCopy:
    """The copy of the state that one save writes. Moments are of ``record.now``."""

    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)  # empty once it is written or lost
    stager: str = ""  # its class
    outline: Outline = None  # of the state that the stager was given; ``None`` if the copy is not compared with it
    release: Callable[[dict[str, Any]], None] = lambda copy: None  # called with the copy when it has been written
    inspect: Callable[[dict[str, Any]], object] = lambda copy: None  # called with the copy when it is complete
    # Why this rank could not stage, which its training loop has raised. Text: the loop still has the error itself.
    failure: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)  # ``failure`` is as it will be
    began: float = 0.0  # when the stager was asked to copy
    completed: float = 0.0  # when it was complete; 0 as long as that is not known
    nbytes: int | None = None  # of its tensor data, once it is there
    near: bool = False  # whether it is for the tier alone
    _future: Future[dict[str, Any]] | None = None  # of the stager, once the copy was asked for

    def complete(self) -> None:
        """Note that the copy is complete now, unless that is known already. May be called on any thread."""
        self.completed = self.completed or record.now()

    def get(self) -> dict[str, Any]:
        """Return the copy, once it is there. Raises: what kept this rank from staging."""
        if self.failure is not None:
            raise CheckpointError(self.failure)
        if isinstance(self.staged, Future):
            self._future = self.staged
            with _as_save_error():
                self.staged = self.staged.copied() if isinstance(self.staged, UnconfirmedCopy) else self.staged.result()
            self.complete()
        return self.staged

    def confirm(self) -> None:
        """Return when nothing can have written the state while it was copied.

        Raises:
            WrittenWhileSavedError: something has written it; the copy must not be committed.
        """
        if self._future is not None:
            with _as_save_error():
                self._future.result()

    def drop(self) -> None:
        """Let go of the copy, which the save has written or never will. The next ``stage`` may wait for its memory."""
        staged, self.staged, self._future = self.staged, {}, None
        if staged and not isinstance(staged, Future):
            self.release(staged)

    def record(self, step: int) -> None:
        """Record the copy, once, if there has been a complete one."""
        if self.completed and self.nbytes is not None:
            seconds, self.completed = self.completed - self.began, 0.0
            record.emit("stage", step=step, start=self.began, seconds=seconds, bytes=self.nbytes, **self.target)

    @property
    def target(self) -> dict[str, bool]:
        """What events say of where it goes: nothing of one that goes to the store."""
        return {"tier": True} if self.near else {}


@contextlib.contextmanager
def _as_save_error() -> Iterator[None]:
    try:
        yield
    except WrittenWhileStagedError as error:
        raise WrittenWhileSavedError(
            f"{'.'.join(map(str, error.path))!r} was written, freed or resized while it was copied, by something that "
            "is neither a torch optimizer nor load_state_dict"
        ) from error


@dataclass
class Sharing:
    """What one save has to know of what several ranks have alike."""

    book: ReplicaShards | None = None  # that decides which shares of it are written
    number: int = 0  # of the save, among those of this run
    compares: bool = False  # whether ranks compare what they have; known when its turn has come
    buffers: Collection[str] | None = None  # if this rank can take part in that: tensors in which they may differ
    replicated: Collection[str] = ()  # entries of which ranks may have a share
    shares: Shares | None = None  # that the copy has in place of what ranks have alike


@dataclass
class PendingSave:
    """One save on this rank. ``called`` is a moment of ``record.now``, ``until`` one of ``time.monotonic``."""

    step: int
    to: Target
    called: float = field(default_factory=lambda: record.now())  # when the training loop has asked for it
    missed: bool = False  # other ranks have called save, and this one has not
    follows: bool = False  # this rank has left its loop, and saves since others do
    taken: Mapping[str, int] = field(default_factory=dict)  # steps that each optimizer and schedule has taken
    copy: StagedCopy = field(default_factory=StagedCopy)
    sharing: Sharing = field(default_factory=Sharing)
    before: PendingSave | None = None  # to the tier, of the same copy, which is made first
    agreed: Future[Any] | None = None  # of the save to the tier: what the save to the store goes on from
    at: str = "waiting for its turn"  # what this rank is doing for it, for messages
    until: float = math.inf  # when it has to be complete; infinite until it is its turn
    late: bool = False  # reported to take too long
    abandoned: bool = False  # given up, and not to be committed
    number: int = 0  # among those of this run that go to the store
    again: bool = False  # in place of a save that was discarded, since the state was written while it was copied
    over: threading.Event = field(default_factory=threading.Event)  # it has ended, well or not
