"""One save, with its copy; where the saves of a checkpointer go; and what is kept of the last one.

A save is made by the call in the training loop (:mod:`.saver`), waits in the background (:mod:`.background`), and is
written and committed there (:mod:`.committing`).
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

import stagereg.record as record
from stagereg.checkpoint.format.encoding import Encoded
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.ranks.merging import Structures
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.shares import ShareBook, Shares
from stagereg.checkpoint.ranks.unchanged import RepeatedExchange
from stagereg.checkpoint.save.logged_metrics import LoggedMetrics
from stagereg.checkpoint.save.state_planner import StatePlanner
from stagereg.checkpoint.storage.protocol import Storage, name_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.keep import GuardedRule, Keep
from stagereg.errors import CheckpointError


class LastSave:
    """What a rank keeps of its last save, so that in the next one it need not send again what has not changed."""

    def __init__(self, repeats: bool) -> None:
        self.plans, self.results = RepeatedExchange(repeats), RepeatedExchange(repeats)
        self.planner = StatePlanner()
        self.plan: SavePlan | None = None  # what this rank would have written
        self.sent: list[SavePlan] = []  # the same, as it is sent
        self.nbytes = 0  # of the tensors in it, without the states of generators
        self.dealt: SavePlan | None = None  # what it was told to write
        self.structures: dict[str, Encoded] = {}  # that this rank had
        self.entries: Structures = {}  # on rank 0: those that ranks had
        self.finished = b""  # on rank 0: what the storage's ``finish_again`` needs
        self.described = ""  # on rank 0: the tensors in the index

    def forget_sent(self) -> None:
        """Send everything in the next save: this one has failed."""
        self.plans.forget_sent()
        self.results.forget_sent()
        self.structures, self.entries = {}, {}


@dataclass
class SaveTarget:
    """Where the saves of one checkpointer go."""

    store: CheckpointStore
    keep: Keep | GuardedRule
    storage: Storage
    ranks: RankGroup  # that save together
    token: str  # of this run, the same on all ranks

    def __post_init__(self) -> None:
        self.storage_name = name_of(self.storage)  # for manifests
        self._tokens = random.Random(self.token)
        self.repeats = isinstance(self.storage, Storage) and self.storage.repeats
        self.metrics = LoggedMetrics()  # on rank 0: of its steps
        self.committed: Checkpoint | None = None  # on rank 0: the last one
        self.last = LastSave(self.repeats)

    def next_token(self) -> str:
        """Return the token of the next save, the same on all ranks without an exchange."""
        return self._tokens.randbytes(len(self.token) // 2).hex()


@dataclass
class StagedCopy:
    """The copy of the state that one save writes. Moments are of ``record.now``."""

    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)  # empty once it is written or lost
    stager: str = ""  # its class
    names: Collection[str] = ()  # of the entries that it was given
    release: Callable[[dict[str, Any]], None] = lambda copy: None  # called with the copy when it has been written
    inspect: Callable[[dict[str, Any]], object] = lambda copy: None  # called with the copy when it is complete
    # Why this rank could not stage, which its training loop has raised. Text: the loop still has the error itself.
    failure: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)  # ``failure`` is as it will be
    began: float = 0.0  # when the stager was asked to copy
    completed: float = 0.0  # when it was complete; 0 as long as that is not known
    nbytes: int | None = None  # of its tensor data, once it is there

    def complete(self) -> None:
        """Note that the copy is complete now, unless that is known already. May be called on any thread."""
        self.completed = self.completed or record.now()

    def get(self) -> dict[str, Any]:
        """Return the copy, once it is there. Raises: what kept this rank from staging."""
        if self.failure is not None:
            raise CheckpointError(self.failure)
        if isinstance(self.staged, Future):
            self.staged = self.staged.result()
            self.complete()
        return self.staged

    def record(self, step: int) -> None:
        """Record the copy, once, if there has been a complete one."""
        if self.completed and self.nbytes is not None:
            seconds, self.completed = self.completed - self.began, 0.0
            record.emit("stage", step=step, start=self.began, seconds=seconds, bytes=self.nbytes)


@dataclass
class Sharing:
    """What one save has to know of what several ranks have alike."""

    book: ShareBook | None = None  # that decides which shares of it are written
    number: int = 0  # of the save, among those of this run
    compares: bool = False  # whether ranks compare what they have; known when its turn has come
    buffers: Collection[str] | None = None  # if this rank can take part in that: tensors in which they may differ
    replicated: Collection[str] = ()  # entries of which ranks may have a share
    shares: Shares | None = None  # that the copy has in place of what ranks have alike


@dataclass
class PendingSave:
    """One save on this rank. ``called`` is a moment of ``record.now``, ``until`` one of ``time.monotonic``."""

    step: int
    to: SaveTarget
    called: float = field(default_factory=lambda: record.now())  # when the training loop has asked for it
    caller: int = field(default_factory=threading.get_ident)  # the thread that has
    hurried: threading.Event = field(default_factory=threading.Event)  # somebody waits for it
    missed: bool = False  # other ranks have called save, and this one has not
    follows: bool = False  # this rank has left its loop, and saves since others do
    taken: Mapping[str, int] = field(default_factory=dict)  # steps that each optimizer and schedule has taken
    copy: StagedCopy = field(default_factory=StagedCopy)
    sharing: Sharing = field(default_factory=Sharing)
    at: str = "waiting for its turn"  # what this rank is doing for it, for messages
    until: float = math.inf  # when it has to be complete; infinite until it is its turn
    late: bool = False  # reported to take too long
    abandoned: bool = False  # given up, and not to be committed
    over: threading.Event = field(default_factory=threading.Event)  # it has ended, well or not
