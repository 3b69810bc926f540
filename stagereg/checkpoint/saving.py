"""One save, from the staged copy to the committed checkpoint: what the background thread does, on all ranks at once.

The ranks first exchange whether they have staged, so that no rank waits for one that could not. Then the storage writes
the files, each rank sends the marks of its own (the storage has computed them while it wrote, or the files are read
once more), and rank 0 commits. A failure on any rank fails the save on all of them and deletes the hidden directory.
The copy is dropped as soon as it is written.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

import stagereg.checkpoint.torchfiles as torchfiles
import stagereg.record as record
from stagereg.checkpoint.encoding import Encoded, encode, leaves
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.index import INDEX, make_index
from stagereg.checkpoint.manifest import FileMark, new_token
from stagereg.checkpoint.process import WriterProcess
from stagereg.checkpoint.process_writer import ProcessWriter
from stagereg.checkpoint.rank_group import RankGroup
from stagereg.checkpoint.storage.forwarding import ForwardingWriter
from stagereg.checkpoint.storage.lookup import name_of
from stagereg.checkpoint.storage.protocol import MarksFiles, Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.retry import within
from stagereg.errors import CheckpointError

__all__ = ["Save", "SaveResult", "carry_out"]

T = TypeVar("T")

_RANK_FILE = re.compile(r"__(\d+)_")
_TRYING = 0.5  # of the time-out; the rest is for clearing away and reporting


@dataclass
class Save:
    """One save on its way to the background.

    Attributes:
        step: the training step.
        staged: the copy, or the promise of one.
        failure: why there is no good copy, if this rank could not stage; its training loop has raised it already. Text,
            since the training loop is still busy with the error itself.
        settled: set when the training loop has done its part, and ``failure`` is as it will be.
        began: when the stager was asked to copy (``record.now``).
        copied: when the copy was complete; 0 as long as that is not known.
        nbytes: of the copy's tensor data, once it has been taken.
        at: what this rank is doing for it, for messages.
        waits: whether that is waiting for other ranks.
        until: when it has to be complete, on ``time.monotonic``.
        abandoned: set when the save has been given up; then it is not committed.
        release: called with the copy when it has been written; the stager's, if it has one. A copy that could not be
            written is dropped.
    """

    step: int
    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)
    failure: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)
    began: float = 0.0
    copied: float = 0.0
    nbytes: int | None = None
    at: str = "waiting for its turn"
    waits: bool = False
    until: float = math.inf
    abandoned: bool = False
    release: Callable[[dict[str, Any]], None] = lambda copy: None
    _recorded: bool = False

    def now(self, at: str) -> None:
        """Note what this rank is doing from now on, which is ``waiting for the others`` or its own work."""
        self.at, self.waits = at, at.startswith("waiting for the other")

    def then_wait(self, done: T) -> T:
        """Note that this rank has ``done`` its part, which is returned, and waits for the others."""
        self.now("waiting for the others")
        return done

    def complete(self) -> None:
        """Note that the copy is complete now, unless that is known already. May be called on any thread."""
        self.copied = self.copied or record.now()

    def take(self) -> dict[str, Any]:
        """Return the copy and let go of it. Raises: what kept this rank from staging."""
        staged, self.staged = self.staged, {}
        if self.failure is not None:
            raise CheckpointError(self.failure)
        ready = staged.result() if isinstance(staged, Future) else staged
        if isinstance(staged, Future):
            self.complete()
        return ready

    def settle(self) -> None:
        """Wait for the training loop, whose stager may have waited for the writer. Raises as :meth:`take` does."""
        self.settled.wait()
        if self.failure is not None:
            raise CheckpointError(self.failure)

    def record_copied(self) -> None:
        """Record the copy, once, if there is a complete one."""
        if self.copied and self.nbytes is not None and not self._recorded:
            self._recorded = True
            seconds = self.copied - self.began
            record.emit("stage", step=self.step, start=self.began, seconds=seconds, bytes=self.nbytes)


@dataclass(frozen=True)
class SaveResult:
    """What one committed save was on this rank.

    Attributes:
        bytes_staged: bytes of tensor data that were copied.
        bytes_written: bytes of the files.
        began: when all ranks had staged (``record.now``).
        seconds: from then until it was committed.
    """

    bytes_staged: int
    bytes_written: int
    began: float
    seconds: float


def carry_out(
    save: Save,
    store: CheckpointStore,
    keep: int,
    storage: Storage,
    plans: torchfiles.Plans,
    ranks: RankGroup,
    process: WriterProcess | None = None,
) -> SaveResult:
    """Write one save through ``storage`` and commit it in ``store``, keeping the ``keep`` newest. Collective.

    The storage writes in ``process``, if there is one.

    Raises:
        CheckpointError: on all ranks, if it failed on any.
    """
    failing = f"Step {save.step} was not saved"
    copies: list[dict[str, Any]] = []
    state: dict[str, Any] = {}

    def ready() -> tuple[int, str, dict[str, Encoded]]:
        copies.append(save.take())
        state.update(copies[0])
        structures = {name: encode(value, name) for name, value in copies[0].items()}  # refuses what cannot be saved
        save.nbytes = _tensor_bytes(copies[0])
        failpoint("staged")
        save.now("waiting for the others to stage")
        return save.step, new_token(), structures

    save.now("waiting for its copy")
    posts = ranks.run_on_all(failing, ready)
    failpoint("agreed")
    began = record.now()
    if len({step for step, *_ in posts}) > 1:
        raise CheckpointError(f"The ranks saved different steps at the same time: {[step for step, *_ in posts]}.")
    written = store.temporary(save.step, posts[0][1])
    try:
        writer = _Watched(storage if process is None else ProcessWriter(storage, process, save.until), save, ranks)
        writer.structures = [structures for _, _, structures in posts]
        writer.write_index = partial(store.put, written, INDEX)
        with within(_TRYING * (save.until - time.monotonic())):
            torchfiles.write(state, written, writer, plans, ranks.group, failing)
            state.clear()
            save.release(copies.pop())
            ranks.run_on_all(failing, save.settle)
            save.record_copied()
            nbytes = _commit(failing, store, written, save, keep, storage, ranks, writer)
    except BaseException:
        if ranks.rank == 0:
            with within(save.until - time.monotonic()):
                store.discard(written)
        raise
    return SaveResult(save.nbytes or 0, nbytes, began, record.now() - began)


class _Watched(ForwardingWriter):
    """Notes when this rank makes ready to write, when it writes, and when it waits for the others to have written."""

    structures: list[dict[str, Encoded]]
    write_index: Callable[[bytes], FileMark]
    index_mark: FileMark | None = None

    def __init__(self, inner: StorageWriter, save: Save, ranks: RankGroup) -> None:
        super().__init__(inner)
        self._save, self._ranks = save, ranks

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._ranks.check_still_there()
        self._save.now("preparing its files")
        return self._save.then_wait(super().prepare_local_plan(plan))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        self._ranks.check_still_there()
        self._save.now("writing its files")
        return self._save.then_wait(super().write_data(plan, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._save.now("writing the metadata")
        super().finish(metadata, results)
        self.index_mark = self.write_index(make_index(metadata, results, self.structures))
        self._save.now("waiting for the others")


def _commit(
    failing: str,
    store: CheckpointStore,
    written: str,
    save: Save,
    keep: int,
    storage: Storage,
    ranks: RankGroup,
    writer: _Watched,
) -> int:
    """Publish what is written, and return the bytes of this rank's files."""

    def look() -> dict[str, FileMark]:
        save.now("looking at its files")
        failpoint("written")
        return save.then_wait(_marks(store, written, storage, ranks.rank))

    def go_on() -> None:
        failpoint("marked")
        if save.abandoned:
            raise CheckpointError("it took too long and was given up")

    marks = ranks.run_on_all(failing, look)
    files: dict[str, FileMark] = {name: mark for share in marks for name, mark in share.items()}
    ranks.run_on_all(failing, go_on)  # first, or rank 0 may commit what another rank has given up

    def publish() -> None:
        if ranks.rank == 0:
            save.now("committing")
            if writer.index_mark is not None:
                files[INDEX] = writer.index_mark
            files.update({name: store.mark(written, name) for name in store.files(written) if name not in files})
            store.publish(written, save.step, ranks.size, name_of(storage), files, keep)

    ranks.run_on_all(failing, publish)
    failpoint("ended")
    return sum(mark.bytes for mark in marks[ranks.rank].values())


def _marks(store: CheckpointStore, written: str, storage: Storage, rank: int) -> dict[str, FileMark]:
    """Return the marks of what this rank wrote.

    A file that the storage has not marked is flushed and read, by the rank that torch has named it after. What is left,
    such as metadata, is rank 0's.
    """
    known: Mapping[str, FileMark] = storage.marks if isinstance(storage, MarksFiles) else {}
    there = store.files(written)
    lost = sorted(known.keys() - there)
    if lost:
        raise CheckpointError(f"{written} has lost what was just written there: {', '.join(lost)}")
    marks = {name: known[name] for name in there if name in known}
    own = [name for name in there if name not in known and _names(name, rank)]
    return {**marks, **{name: store.mark(written, name) for name in own}}


def _names(file: str, rank: int) -> bool:
    named = _RANK_FILE.match(file)
    return named is not None and int(named[1]) == rank


def _tensor_bytes(state: dict[str, Any]) -> int:
    tensors = (
        leaf for name, value in state.items() for _, leaf in leaves(value, name) if isinstance(leaf, torch.Tensor)
    )
    return sum(tensor.nbytes for tensor in tensors)
