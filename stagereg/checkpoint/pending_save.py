"""One save, from the call in the training loop to the committed checkpoint, and the thread that works off saves.

:class:`PendingSave` is one save, and :func:`write_and_commit` what the thread of :class:`Background` does with it, on
all ranks at once. There are two exchanges, and nothing is left out of either:

1. Before any file: every rank sends that it has staged and what it would write; rank 0 answers which rank writes what.
   Without it a rank would write for nothing, or two ranks the same.
2. After the files: every rank sends what it has written, with sizes and checksums; rank 0 writes the metadata, commits
   and answers that it has. Without it a checkpoint would be committed with files missing, or a rank would not know how
   its save has ended.

A failure on any rank fails the save on all of them and deletes the hidden directory. Each rank lets go of its copy as
soon as its files are written. At most two saves are under way: one being written and one waiting, which matches a
stager that hands out two copies.

A failure is kept until a call raises it, or else the end of the job or process (:mod:`stagereg.shutdown`); or it is
logged where it happens, and the end reports only that the last save has failed. It is kept without tracebacks, which
would keep the staged memory alive; they are logged at level DEBUG. A save that takes longer than the time-out counts as
failed from then on, and as hanging until it ends: a thread that waits for the storage cannot be ended. So it is a
daemon thread, and every wait here ends with the time-out.
"""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import logging
import math
import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

import stagereg.checkpoint.rng as rng
import stagereg.record as record
import stagereg.shutdown as shutdown
from stagereg.checkpoint.advice import advice, causes
from stagereg.checkpoint.backward import wait_for_backward
from stagereg.checkpoint.encoding import Encoded
from stagereg.checkpoint.entries import rng_name
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.index import INDEX, describe_tensors, make_index
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.merging import Asked, EntryDigests, Merging, RankEntries, Sent, Structures, groups_in
from stagereg.checkpoint.rank_group import DisagreementError, RankGroup, reason
from stagereg.checkpoint.schedule import Schedule
from stagereg.checkpoint.sharing import SAMPLES, Part, Replicas, shares
from stagereg.checkpoint.state_planner import StatePlanner, by_number, from_numbers, joined, name_for_each, split
from stagereg.checkpoint.storage.protocol import ArchiveResult, Storage, TensorResult, name_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.retry import within
from stagereg.checkpoint.unchanged import Unchanged
from stagereg.errors import CheckpointError, name_ranks

__all__ = ["Background", "CheckpointStats", "PendingSave", "SaveTarget"]

_log = logging.getLogger(__name__)

_WAITING = "waiting for the others"  # what a rank that has done its part is doing
_TRYING = 0.5  # of the time-out; the rest is for clearing away and reporting
_MOST_UNDER_WAY = 2
_CALM_S = 2.0  # how long one waits for a moment at which training hardly notices
_LOOK_S = 0.05  # how often one looks whether a save takes too long
_IDLE_S = 1.0  # how often the thread looks for what this rank has passed over


@dataclass
class CheckpointStats:
    """What this process's checkpoints have cost so far.

    Attributes:
        saves: checkpoints committed.
        bytes_staged: bytes of tensor data copied on this rank, over all committed saves.
        stall_seconds: how long each call of ``save`` held the training loop, in order of the calls.
        write_seconds: how long the background took to write and commit each checkpoint, in order of the commits.
    """

    saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)


class _Prepared(NamedTuple):
    """What a rank sends with its plan when it has staged."""

    step: int
    called: bool = True
    follows: bool = False
    taken: Mapping[str, int] = {}
    digests: EntryDigests = EntryDigests({}, {}, {}, {})
    shares_of: int | None = None


_Written: TypeAlias = tuple[dict[str, FileMark], Sent]


@dataclass
class SaveTarget:
    """Where the saves of one checkpointer go."""

    store: CheckpointStore
    keep: int
    storage: Storage
    ranks: RankGroup  # that save together
    token: str  # of this run, the same on all ranks

    def __post_init__(self) -> None:
        self.storage_name = name_of(self.storage)  # for manifests
        self._tokens = random.Random(self.token)
        repeats = isinstance(self.storage, Storage) and self.storage.repeats
        self.plans, self.results = Unchanged(repeats), Unchanged(repeats)
        self.planner = StatePlanner()
        self.plan: SavePlan | None = None  # what this rank would have written in the last save
        self.sent: list[SavePlan] = []  # the same, as it is sent
        self.dealt: SavePlan | None = None  # what it was told to write
        self.before: dict[str, Encoded] = {}  # the structures that this rank had in the last save
        self.entries: Structures = {}  # on rank 0: those that ranks had
        self.described = ""  # on rank 0: the tensors in the last index

    def forget(self) -> None:
        """Send everything in the next save: this one has failed."""
        self.plans.forget()
        self.results.forget()
        self.before, self.entries = {}, {}

    def next_token(self) -> str:
        """Return the token of the next save, the same on all ranks without an exchange."""
        return self._tokens.randbytes(len(self.token) // 2).hex()


@dataclass
class PendingSave:
    """One save on this rank. Moments are of ``record.now``, but for ``until``, which is of ``time.monotonic``."""

    step: int
    to: SaveTarget
    called: float = field(default_factory=lambda: record.now())  # when the training loop has asked for it
    caller: int = field(default_factory=threading.get_ident)  # the thread that has
    hurried: threading.Event = field(default_factory=threading.Event)  # somebody waits for it
    staged: dict[str, Any] | Future[dict[str, Any]] = field(default_factory=dict)  # empty once it is written or lost
    release: Callable[[dict[str, Any]], None] = lambda copy: None  # called with the copy when it has been written
    # Why this rank could not stage, which its training loop has raised. Text: the loop still has the error itself.
    failure: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)  # ``failure`` is as it will be
    missed: bool = False  # other ranks have called save, and this one has not
    names: Collection[str] = ()  # of the entries that the stager is given
    stager: str = ""  # its class
    follows: bool = False  # this rank has left its loop, and saves since others do
    taken: Mapping[str, int] = field(default_factory=dict)  # steps that each optimizer and schedule has taken
    replicas: Replicas | None = None  # that is given what the ranks have alike
    number: int = 0  # among the saves of this run
    compares: bool = False  # whether ranks compare what they have
    buffers: Collection[str] | None = None  # if this rank takes part in that: tensors in which they may differ
    replicated: Collection[str] = ()  # entries of which ranks may have a share
    parts: Mapping[str, Part | None] = field(default_factory=dict)  # where what this rank has a share of lies
    shares_of: int | None = None  # the number of the save in which ranks compared what they share now
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
    to, ranks, work = save.to, save.to.ranks, _Work(save)
    failing = f"Step {save.step} was not saved"
    try:
        with within(_TRYING * (save.until - time.monotonic())):
            work.take(to.plans.round_trip(ranks, failing, work.prepare, work.share_out))
            began = record.now()
            nbytes = to.results.round_trip(ranks, failing, work.write, work.commit)
            failpoint("ended")
        to.before = work.entries.structures
        if save.replicas is not None and save.compares:
            alike = {name: of for name, of in work.asked.replicas.items() if name in save.replicated}
            save.replicas.agree(save.number, shares(work.entries.contents, alike))
    except BaseException:
        to.forget()
        if save.replicas is not None:
            save.replicas.forget()
        if ranks.rank == 0:
            with within(save.until - time.monotonic()):
                to.store.discard(work.path)
        raise
    finally:
        save.staged, work.planner.state_dict = {}, {}
    return began, nbytes


class _Work:
    """One save on the background thread: all ranks :meth:`prepare` and :meth:`write`, and rank 0 answers them.

    Attributes:
        path: the hidden directory.
        planner: has the tensors until they are written.
        entries: what this rank has of each entry.
        asked: what rank 0 asks it for.
    """

    entries: RankEntries
    asked: Asked
    _plans: list[SavePlan]  # what this rank would write
    _more: list[SavePlan]  # that again, if it was not sent before the files
    _results: list[WriteResult]
    _order: list[int]  # on rank 0: ranks that have left their loop come last
    _follows: list[int]  # these
    _merging: Merging

    def __init__(self, save: PendingSave) -> None:
        self._save, self._to, self._ranks = save, save.to, save.to.ranks
        self._token = save.to.next_token()
        self.path = save.to.store.temporary(save.step, self._token)
        self.planner = save.to.planner
        self.planner.parts = save.parts
        self._metadata: Metadata | None = None

    def prepare(self) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        """Return that this rank has staged, and what it would write."""
        save, storage = self._save, self._to.storage
        if save.missed:
            return _Prepared(save.step, False), (), ()
        save.at = "waiting for its copy"
        if save.failure is None:
            wait_for_backward(save.caller, save.hurried, _CALM_S)
        copy = dict(_expect_whole(save, save.copy()))
        if (own := rng_name(self._ranks.rank)) in copy:
            copy[own] = rng.as_tensors(copy[own])
        self.entries = RankEntries(copy, save.buffers)  # refuses what cannot be saved
        failpoint("staged")
        save.at = "preparing its files"
        storage.reset(self.path)
        is_first = self._ranks.rank == 0
        self.planner.set_up_planner(
            {name: copy[name] for name in copy if name != SAMPLES}, storage.storage_meta(), is_first
        )
        parts = (part for x in self.planner.state_dict.values() for part in _parts(x))
        save.nbytes = sum(part.nbytes for part in parts) - sum(x.nbytes for x in copy.get(own, {}).values())
        takes_more = "kwargs" in inspect.signature(storage.set_up_storage_writer).parameters  # as torch asks
        more = {"rank": self._ranks.rank, "use_collectives": True} if takes_more else {}
        storage.set_up_storage_writer(is_first, **more)
        plan = storage.prepare_local_plan(self.planner.create_local_plan())
        if plan is not self._to.plan:
            self._to.plan, self._to.sent = plan, [plan] if self._ranks.size == 1 else split(plan, self._ranks.rank)
        self._plans = self._to.sent
        save.at = _WAITING
        digests = self.entries.digests(self._to.before)
        sent = _Prepared(save.step, True, save.follows, save.taken, digests, save.shares_of)
        return sent, (*self._plans, (save.follows, self.entries.kinds)), ()

    def share_out(
        self, prepared: Sequence[_Prepared], lasting: Sequence[Sequence[Any]] | None
    ) -> list[tuple[Any, Asked]]:
        """Return what each rank writes, ``None`` for the same as in the save before, and what it is asked for."""
        steps = [each.step for each in prepared]
        _expect_all_called(self._save.step, prepared)
        if len(set(steps)) > 1:
            for step in steps:
                self._to.store.discard(self._to.store.temporary(step, self._token))
            raise CheckpointError(f"The ranks saved different steps at the same time: {steps}.")
        _expect_all_up_to_date(self._save.step, prepared)
        if len({each.shares_of for each in prepared}) > 1:
            raise CheckpointError("The ranks did not all know who has a share of what; the next save compares anew.")
        # Of what several ranks have alike the first one's is stored: numbers are stale on one that has left its loop.
        self._follows = [rank for rank, each in enumerate(prepared) if each.follows]
        self._order = sorted(range(len(prepared)), key=lambda rank: prepared[rank].follows)
        self._merging = Merging([each.digests for each in prepared], self._order, self._follows, self._to.entries)
        asked = self._merging.ask()
        if lasting is None:
            return [(None, each) for each in asked]
        given = [each[:-1] for each in lasting]
        plans = self._plan_all(given)
        dealt = self._to.storage.prepare_global_plan([plans[rank] for rank in range(len(given))])
        return list(zip(map(by_number, dealt, map(joined, given)), asked, strict=True))

    def _plan_all(self, given: Sequence[Sequence[SavePlan]]) -> dict[int, SavePlan]:
        given = _without_shared(given, self._follows)
        plans, self._metadata = self.planner.create_global_plan([x for rank in self._order for x in given[rank]])
        parts = iter(plans)
        return {rank: joined([next(parts) for _ in given[rank]]) for rank in self._order}

    def take(self, answer: tuple[SavePlan | None, Asked]) -> None:
        """Note what rank 0 has answered."""
        dealt, self.asked = answer
        self._more = self._plans if dealt is None else []
        if dealt is not None:
            self._to.dealt = from_numbers(dealt, joined(self._plans))
            self._to.results.forget()  # what lies where may be as before, and yet be something else: of another dtype

    def write(self) -> tuple[_Written, Sequence[Any], Sequence[Any]]:
        """Write this rank's files, and let go of its copy."""
        save = self._save
        failpoint("agreed")
        save.at = "writing its files"
        own = self.planner.finish_plan(cast("SavePlan", self._to.dealt))
        self._results = self._to.storage.write_data(own, self.planner).wait()
        self.planner.state_dict = {}
        copy, save.staged = save.copy(), {}
        save.release(copy)
        del copy
        save.settled.wait()
        save.copy()  # which may have proved bad since
        save.record_copied()
        marks = self._marks() if self._ranks.rank > 0 else {}  # those of rank 0 come with the metadata's
        failpoint("written")
        save.at = _WAITING
        return (marks, self.entries.answer(self.asked, self._to.before)), [self._results], self._more

    def commit(self, written: Sequence[_Written], lasting: Sequence[Sequence[Any]] | None) -> list[int]:
        """Commit what all have written, and return the bytes of each rank's files."""
        save, to = self._save, self._to
        save.at = "committing"
        if save.abandoned:
            raise CheckpointError("it took too long and was given up")
        state = self._merging.put_together([sent for _, sent in written])
        if lasting is None:
            to.storage.finish_again()
        else:
            if self._metadata is None:
                self._plan_all([plans for _, *plans in lasting])
            metadata, results = cast("Metadata", self._metadata), [[*each[0]] for each in lasting]
            objects = {name for encoded in state.values() for name in encoded.objects}
            to.described = describe_tensors(metadata, results, objects)
            name_for_each(metadata, results, groups_in(state))
            to.storage.finish(metadata, results)
        own = self._marks()
        files = {name: mark for marks, _ in written for name, mark in marks.items()} | own
        files[INDEX] = to.store.put(self.path, INDEX, make_index(to.described, state))
        there = to.store.files(self.path)
        if lost := sorted(files.keys() - there):
            raise CheckpointError(f"{self.path} has lost what was just written there: {', '.join(lost)}")
        files |= {name: to.store.mark(self.path, name) for name in there if name not in files}
        failpoint("marked")
        to.entries = self._merging.entries
        to.store.publish(self.path, save.step, self._ranks.size, to.storage_name, files, to.keep)
        return [sum(mark.bytes for mark in marks.values()) for marks in [own, *(each for each, _ in written[1:])]]

    def _marks(self) -> dict[str, FileMark]:
        """Return the marks of what this rank wrote; what its storage has not marked is flushed and read.

        What no rank has named, such as metadata, is rank 0's to mark.
        """
        storage, store = self._to.storage, self._to.store
        known: Mapping[str, FileMark] = storage.marks if isinstance(storage, Storage) else {}
        if all(isinstance(each, (ArchiveResult, TensorResult)) for each in self._results):
            names = {each.storage_data.relative_path for each in self._results}
        else:  # a storage that does not say where it has put something: by the rank that torch has named a file after
            names = {name for name in store.files(self.path) if name.startswith(f"__{self._ranks.rank}_")}
        return {**known, **{name: store.mark(self.path, name) for name in sorted(names - known.keys())}}


def _expect_whole(save: PendingSave, copy: object) -> dict[str, Any]:
    if not isinstance(copy, dict):
        raise CheckpointError(f"stage() of {save.stager} returned {copy!r:.80}, and has to return a copy of its dict")
    if lost := [name for name in save.names if name not in copy]:
        raise CheckpointError(f"stage() of {save.stager} returned a copy without {', '.join(map(repr, lost))}")
    return copy


def _expect_all_called(step: int, prepared: Sequence[_Prepared]) -> None:
    missed = [rank for rank, each in enumerate(prepared) if not each.called]
    if missed:
        others = [rank for rank in range(len(prepared)) if rank not in missed]
        raise DisagreementError(
            f"{name_ranks(others)} called save(step {step}), {name_ranks(missed)} did not: call save and maybe_save on "
            "all ranks, with an empty batch too, and not under `if rank == 0`."
        )


def _expect_all_up_to_date(step: int, prepared: Sequence[_Prepared]) -> None:
    """Refuse what a rank holds from long ago that has left its loop, and steps only what the join knows."""
    if not any(each.follows for each in prepared):
        return
    for name in sorted({name for each in prepared for name in each.taken}):
        taken = [each.taken.get(name, 0) for each in prepared]
        if len(set(taken)) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(taken))
            raise DisagreementError(
                f"{name!r} is not the same on all ranks: it has taken {counts} steps. Ranks that have left the loop "
                "step only what the join knows: list the optimizer, the schedule or the function that steps them, as "
                "in Join([model, optimizer])."
            )


def _without_shared(given: Sequence[Sequence[SavePlan]], follows: Collection[int]) -> Sequence[Sequence[SavePlan]]:
    """Return plans in which a rank that has left its loop leaves to the others what they have shares of."""
    if not follows:
        return given
    active = (plan for rank, plans in enumerate(given) if rank not in follows for plan in plans)
    shared = {item.index.fqn for plan in active for item in plan.items if _is_shard(item)}

    def own(plan: SavePlan) -> SavePlan:
        items = [each for each in plan.items if _is_shard(each) or each.index.fqn not in shared]
        return dataclasses.replace(plan, items=items)

    return [[*map(own, plans)] if rank in follows else plans for rank, plans in enumerate(given)]


def _is_shard(item: WriteItem) -> bool:
    return item.type is WriteItemType.SHARD


def _parts(x: Any) -> list[torch.Tensor]:
    """Return what this rank has of a tensor."""
    if isinstance(x, ShardedTensor):
        return [shard.tensor for shard in x.local_shards()]
    return [x.to_local() if isinstance(x, DTensor) else x] if isinstance(x, torch.Tensor) else []


class Background:
    """The thread, and what has become of its saves.

    All methods are for the training thread, and for the end of the process, which may come while that still runs. In a
    forked child nothing is under way: it has no such thread.

    Args:
        target: where the saves go.
        timeout: of one save, from when the one before it has ended.
        schedule: is given how old each state was when its checkpoint was complete.
        warns: whether failures are logged, and never raised.

    Attributes:
        newest: the step of the newest checkpoint there that this run knows to be good.
        last: why the last save that has ended failed; ``None`` if it did not.
        stats: of its saves.
        timeout_s: as ``timeout``, in seconds.
        warns: as given.
    """

    def __init__(
        self, target: SaveTarget, timeout: datetime.timedelta, schedule: Schedule, warns: bool = False
    ) -> None:
        self.newest: int | None = None
        self.last: CheckpointError | None = None
        self.stats = CheckpointStats()
        self._target = target
        self.timeout_s = timeout.total_seconds()
        self._schedule = schedule
        self.warns = warns
        self._status: CheckpointError | None = None  # what the end reports if failures are warnings
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._look: Callable[[], Callable[[], None] | None] = lambda: None
        self._process = os.getpid()
        self._clearing = False  # whether it deletes what is no longer kept
        self._lock = threading.Lock()
        self._under_way: deque[PendingSave] = deque()
        self._failures: deque[CheckpointError] = deque()
        weakref.finalize(self, self._queue.put, None)  # or the thread of one that was never closed would stay
        shutdown.wait_for(self)

    @property
    def hanging(self) -> bool:
        """Whether the save being written has passed the time-out, which was reported, and has not ended."""
        first = self._first()
        return first is not None and first.late

    def admit(self, save: PendingSave) -> None:
        """Wait until ``save`` may be staged. Raises ``CheckpointError`` if an earlier save has failed, or hangs."""
        self._wait(_MOST_UNDER_WAY)
        self.raise_failure()
        if self.hanging:
            self.set_status(save.step)
            raise CheckpointError(f"Step {save.step} was not saved: an earlier save hangs. {self.describe_newest()}")

    def submit(self, save: PendingSave) -> None:
        """Have ``save`` written after those before it; its failure is kept for :meth:`raise_failure`."""
        self._start()
        self._under_way.append(save)
        self._queue.put(partial(self._write, save))

    def look_out(self, look: Callable[[], None]) -> None:
        """Call ``look`` on the thread about once a second while nothing is written. A bound method, held weakly."""
        self._look = weakref.WeakMethod(look)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            arguments = (self._queue, self._look)
            thread = threading.Thread(target=_work, args=arguments, name="stagereg-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CheckpointError(f"No thread to write checkpoints could be started: {error}") from error
            self._thread = thread

    def finish(self, cleared: bool = True) -> bool:
        """Wait until every save has ended, well or not, and old checkpoints are deleted; False if that takes too long.

        ``cleared`` is False for one who does not wait for the deleting.
        """
        ended, until = self._wait(1), time.monotonic() + self.timeout_s
        while cleared and ended and self._clearing and os.getpid() == self._process:
            time.sleep(_LOOK_S)
            ended = time.monotonic() < until
        return ended

    @property
    def failing(self) -> bool:
        """Whether :meth:`raise_failure` would raise."""
        self._first()
        return bool(self._failures)

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet, and log later ones."""
        self._first()
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        for failure in failures:
            shutdown.withdraw_error(failure)
        for later in failures[1:]:
            _log.error("%s", later)
        if failures:
            raise failures[0]

    def raise_or_warn(self, error: BaseException) -> None:
        """Raise what has kept this rank from staging; log it if failures are warnings."""
        if not self.warns or not isinstance(error, CheckpointError):
            raise error
        self._warn(error)

    def set_status(self, failed: int | None) -> None:
        """Have the end report that the save of step ``failed`` was the last one, if failures are warnings."""
        if self._status is not None:
            shutdown.withdraw_error(self._status)
        self._status = None
        if self.warns and failed is not None:
            text = f"the last save has failed, of step {failed}, so the exit status is 1. {self.describe_newest()}"
            self._status = CheckpointError(text)
            shutdown.report_error(self._status)

    def describe_newest(self) -> str:
        """Return a sentence on the newest good checkpoint."""
        if self.newest is None:
            return f"This run has no complete checkpoint in {self._target.store.root} yet."
        return f"The newest good checkpoint is step {self.newest}, in {self._target.store.root}."

    def close(self) -> None:
        """End the thread after its last save; one that hangs commits nothing, should it ever go on."""
        for save in self._under_way:
            save.abandoned = True
        self._queue.put(None)

    def _wait(self, most: int) -> bool:
        """Wait until fewer than ``most`` saves are under way; False if one of them has taken too long."""
        while (first := self._first()) is not None and not first.late and len(self._under_way) >= most:
            for save in list(self._under_way):
                save.hurried.set()
            first.over.wait(_LOOK_S)
        return first is None or not first.late

    def _first(self) -> PendingSave | None:
        """Return the first save that has not ended, if there is one; report it once it takes too long."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            while self._under_way and self._under_way[0].over.is_set():
                self._under_way.popleft()
            if not self._under_way:
                return None
            first = self._under_way[0]
            if not first.late and time.monotonic() >= first.until:
                first.late = True
                self._keep(first.step, self._lateness(first), everywhere=first.at == _WAITING)
            return first

    def _lateness(self, save: PendingSave) -> CheckpointError:
        ranks, seconds = self._target.ranks, self.timeout_s
        who = "it" if ranks.group is None else f"rank {ranks.rank}"
        limit = f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
        return CheckpointError(
            f"Step {save.step} was not saved: it has taken longer than {limit} ({who} is at: {save.at}). Does the "
            f"storage hang? Until this ends, no other save begins. {self.describe_newest()}"
        )

    def _keep(self, step: int, failure: CheckpointError, everywhere: bool = True) -> None:
        self.last = failure
        self.set_status(step)
        if self.warns:
            self._warn(failure, everywhere)
        else:
            shutdown.report_error(failure)
            self._failures.append(failure)

    def _warn(self, failure: CheckpointError, everywhere: bool = False) -> None:
        """Log a failed save while training goes on; what is reported ``everywhere`` is a warning on rank 0 only."""
        log = _log.info if everywhere and self._target.ranks.rank > 0 else _log.warning
        log("stagereg: %s Training goes on.", failure)

    # -- on the thread

    def _write(self, save: PendingSave) -> None:
        save.until = time.monotonic() + self.timeout_s
        failure: CheckpointError | None = None
        try:
            began, nbytes = write_and_commit(save)
        except BaseException as error:
            failure = self._fail(save, error)
            _log.debug("A save failed.", exc_info=error)
            for connected in causes(error):
                connected.__traceback__ = None
        else:
            ended = record.now()
            self.newest, self.last = save.step, None
            self.set_status(None)
            self.stats.saves += 1
            self.stats.write_seconds.append(ended - began)
            self.stats.bytes_staged += save.nbytes or 0
            self._schedule.ended(ended - save.called)
            where = {"bytes": nbytes, "dir": self._target.store.root}
            record.emit("write", step=save.step, start=began, seconds=ended - began, **where)
        with self._lock:
            self._clearing = True
            if save.late:
                state = "is saved after all" if save.step == self.newest else "was not saved"
                _log.warning("stagereg: storage is responding again; step %d %s", save.step, state)
            elif failure is not None:
                self._keep(save.step, failure)
            save.over.set()
        try:
            self._target.store.clear()
        except Exception:
            _log.debug("Deleting old checkpoints failed.", exc_info=True)
        self._clearing = False

    def _fail(self, save: PendingSave, error: BaseException) -> CheckpointError | None:
        """Note that a save has failed; return what is to be raised, ``None`` if its training loop has raised it."""
        save.record_copied()
        record.emit("lost", step=save.step, error=reason(error))
        self._schedule.ended(None)
        if isinstance(error, CheckpointError) and save.failure is not None:
            self.last = error
            self.set_status(save.step)
            return None
        known = isinstance(error, CheckpointError)
        text = reason(error) if known else f"Step {save.step} was not saved: {reason(error)}"
        parts = (f"{text.rstrip('.')}.", advice(error, self._target.store.root), self.describe_newest())
        failure = CheckpointError(" ".join(part for part in parts if part))
        failure.__cause__ = error.__cause__ if known else error
        return failure


def _work(saves: queue.SimpleQueue[Callable[[], None] | None], look: Callable[[], Callable[[], None] | None]) -> None:
    while True:
        try:
            write = saves.get(timeout=_IDLE_S)
        except queue.Empty:
            write = look()
            try:
                if write is not None:
                    write()
            except Exception:  # the store, or the group, is gone; saves that still come must find the thread
                _log.debug("Looking for what this rank has passed over failed.", exc_info=True)
        else:
            if write is None:
                return
            write()
        del write  # while it waits for the next save, the thread keeps nothing alive
