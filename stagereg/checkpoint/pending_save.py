"""One save, from the call in the training loop to the committed checkpoint.

:class:`PendingSave` is its state, and :func:`write_and_commit` what the background thread does with it, on all ranks at
once. There are two exchanges, and nothing is left out of either:

1. Before any file: every rank sends that it has staged and what it would write; rank 0 answers which rank writes what.
   Without it a rank would write for nothing, or two ranks the same.
2. After the files: every rank sends what it has written, with sizes and checksums; rank 0 writes the metadata, commits
   and answers that it has. Without it a checkpoint would be committed with files missing, or a rank would not know how
   its save has ended.

A failure on any rank fails the save on all of them and deletes the hidden directory. Each rank lets go of its copy as
soon as its files are written.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

import stagereg.record as record
from stagereg.checkpoint.encoding import Encoded, encode
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.index import INDEX, make_index
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.rank_group import RankGroup
from stagereg.checkpoint.state_planner import StatePlanner
from stagereg.checkpoint.storage.lookup import name_of
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.retry import within
from stagereg.checkpoint.writer_process import WriterProcess, write_data
from stagereg.errors import CheckpointError

__all__ = ["WAITING", "PendingSave", "SaveTarget", "write_and_commit"]

WAITING = "waiting for the others"
"""What a rank that has done its part is doing."""
_TRYING = 0.5  # of the time-out; the rest is for clearing away and reporting
_Written: TypeAlias = tuple[list[WriteResult], dict[str, FileMark], dict[str, Encoded]]


@dataclass
class SaveTarget:
    """Where the saves of one checkpointer go."""

    store: CheckpointStore
    keep: int
    storage: Storage
    ranks: RankGroup  # that save together
    process: WriterProcess | None  # where the storage writes; ``None`` for this one
    token: str  # of this run, the same on all ranks

    def __post_init__(self) -> None:
        self.storage_name = name_of(self.storage)  # for manifests
        self._tokens = random.Random(self.token)

    def next_token(self) -> str:
        """Return the token of the next save, the same on all ranks without an exchange."""
        return self._tokens.randbytes(len(self.token) // 2).hex()


@dataclass
class PendingSave:
    """One save on this rank. Moments are of ``record.now``, but for ``until``, which is of ``time.monotonic``."""

    step: int
    to: SaveTarget
    called: float = field(default_factory=lambda: record.now())  # when the training loop has asked for it
    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)  # empty once it is written or lost
    release: Callable[[dict[str, Any]], None] = lambda copy: None  # called with the copy when it has been written
    # Why this rank could not stage, which its training loop has raised. Text: the loop still has the error itself.
    failure: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)  # ``failure`` is as it will be
    began: float = 0.0  # when the stager was asked to copy
    copied: float = 0.0  # when the copy was complete; 0 as long as that is not known
    nbytes: int | None = None  # of the copy's tensor data, once it is there
    at: str = "waiting for its turn"  # what this rank is doing for it, for messages
    until: float = math.inf  # when it has to be complete; infinite until it is its turn
    late: bool = False  # reported to take too long
    abandoned: bool = False  # given up, and not to be committed
    over: threading.Event = field(default_factory=threading.Event)  # it has ended, well or not

    def complete(self) -> None:
        """Note that the copy is complete now, unless that is known already. May be called on any thread."""
        self.copied = self.copied or record.now()

    def copy(self) -> dict[str, Any]:
        """Return the copy, once it is there. Raises: what kept this rank from staging."""
        if self.failure is not None:
            raise CheckpointError(self.failure)
        if isinstance(self.staged, Future):
            self.staged = self.staged.result()
            self.complete()
        return self.staged

    def record_copied(self) -> None:
        """Record the copy, once, if there has been a complete one."""
        if self.copied and self.nbytes is not None:
            seconds, self.copied = self.copied - self.began, 0.0
            record.emit("stage", step=self.step, start=self.began, seconds=seconds, bytes=self.nbytes)


def write_and_commit(save: PendingSave) -> tuple[float, int]:
    """Write a save and commit it, keeping the newest. Collective; on the background thread.

    Returns:
        When all ranks had staged (``record.now``), and the bytes of this rank's files.

    Raises:
        CheckpointError: on all ranks, if it failed on any.
    """
    failing, to, ranks = f"Step {save.step} was not saved", save.to, save.to.ranks
    token = to.next_token()
    path = to.store.temporary(save.step, token)
    planner = StatePlanner()
    metadata: list[Metadata] = []
    structures: dict[str, Encoded] = {}

    def prepare() -> tuple[int, SavePlan]:
        save.at = "waiting for its copy"
        copy = save.copy()
        structures.update({name: encode(value, name) for name, value in copy.items()})  # refuses what cannot be saved
        failpoint("staged")
        save.at = "preparing its files"
        to.storage.reset(path)
        planner.set_up_planner(copy, to.storage.storage_meta(), ranks.rank == 0)
        save.nbytes = sum(x.nbytes for x in planner.state_dict.values() if isinstance(x, torch.Tensor))
        takes_more = "kwargs" in inspect.signature(to.storage.set_up_storage_writer).parameters  # as torch asks
        more = {"rank": ranks.rank, "use_collectives": True} if takes_more else {}
        to.storage.set_up_storage_writer(ranks.rank == 0, **more)
        plan = to.storage.prepare_local_plan(planner.create_local_plan())
        save.at = WAITING
        return save.step, plan

    def share_out(prepared: list[tuple[int, SavePlan]]) -> list[SavePlan]:
        steps = [step for step, _ in prepared]
        if len(set(steps)) > 1:
            for step in steps:
                to.store.discard(to.store.temporary(step, token))
            raise CheckpointError(f"The ranks saved different steps at the same time: {steps}.")
        plans, described = planner.create_global_plan([plan for _, plan in prepared])
        metadata.append(described)
        return to.storage.prepare_global_plan(plans)

    def write() -> _Written:
        failpoint("agreed")
        save.at = "writing its files"
        own = planner.finish_plan(plan)
        if to.process is None:
            results = to.storage.write_data(own, planner).wait()
        else:
            results = write_data(to.storage, own, planner, to.process, save.until)
        planner.state_dict = {}
        copy, save.staged = save.copy(), {}
        save.release(copy)
        del copy
        save.settled.wait()
        save.copy()  # which may have proved bad since
        save.record_copied()
        marks = _marks(to, path) if ranks.rank > 0 else {}  # those of rank 0 come with the metadata's
        failpoint("written")
        save.at = WAITING
        return results, marks, structures

    def commit(written: list[_Written]) -> list[int]:
        save.at = "committing"
        if save.abandoned:
            raise CheckpointError("it took too long and was given up")
        results = [each for each, _, _ in written]
        to.storage.finish(metadata[0], results)
        own = _marks(to, path)
        files = {name: mark for _, marks, _ in written for name, mark in marks.items()} | own
        files[INDEX] = to.store.put(path, INDEX, make_index(metadata[0], results, [each for _, _, each in written]))
        files |= {name: to.store.mark(path, name) for name in to.store.files(path) if name not in files}
        failpoint("marked")
        to.store.publish(path, save.step, ranks.size, to.storage_name, files, to.keep)
        return [sum(mark.bytes for mark in marks.values()) for marks in [own, *(each for _, each, _ in written[1:])]]

    try:
        with within(_TRYING * (save.until - time.monotonic())):
            plan = ranks.round_trip(failing, prepare, share_out)
            began = record.now()
            nbytes = ranks.round_trip(failing, write, commit)
            failpoint("ended")
    except BaseException:
        if ranks.rank == 0:
            with within(save.until - time.monotonic()):
                to.store.discard(path)
        raise
    finally:
        save.staged, planner.state_dict = {}, {}
    return began, nbytes


def _marks(to: SaveTarget, path: str) -> dict[str, FileMark]:
    """Return the marks of what this rank wrote.

    A file that the storage has not marked is flushed and read, by the rank that torch has named it after. What is left,
    such as metadata, is rank 0's.
    """
    known: Mapping[str, FileMark] = to.storage.marks if isinstance(to.storage, Storage) else {}
    there = to.store.files(path)
    lost = sorted(known.keys() - there)
    if lost:
        raise CheckpointError(f"{path} has lost what was just written there: {', '.join(lost)}")
    own = [name for name in there if name not in known and name.startswith(f"__{to.ranks.rank}_")]
    return {name: known[name] for name in there if name in known} | {name: to.store.mark(path, name) for name in own}
