"""Writes a staged copy to one save target and commits it. The ranks exchange messages with rank 0 twice:

1. Before the files are written: each rank that has staged sends its write plan; rank 0 replies with the values that the
rank must write. So no rank writes files if another rank could not stage, and no two ranks write the same values. The
ranks may compare replicas in an earlier exchange (:class:`.ReplicaSave`).
2. After the files are written: every rank sends the names, sizes and checksums of its files; rank 0 writes the
metadata, commits, and replies. So no checkpoint is committed with files missing, and every rank knows the result of the
save.

A failure on any rank fails the write on all ranks and deletes the hidden directory. Each rank releases the copy as soon
as its files are written.

With several targets, the first target prepares the copy in its first exchange, so that all ranks prepare their copies
in the same order. The other targets wait until the save to the first target has ended.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

import stagereg.base.record as record
import stagereg.checkpoint.save.state_planner as planning
import stagereg.checkpoint.state.rng as rng
from stagereg.base.deadline import within
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.index import Readable, expect_readable, make_index, tables
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.format.wrappers import inner_tensors
from stagereg.checkpoint.ranks.merging import Asked, EntryMerger, RankEntries, Sent, Structures, groups_in
from stagereg.checkpoint.ranks.unchanged import Exchange
from stagereg.checkpoint.save.scheduling import short_turns
from stagereg.checkpoint.save.staged_copy import Write
from stagereg.checkpoint.save.structure import expect_same_structure
from stagereg.checkpoint.state.entries import rng_name
from stagereg.checkpoint.storage.digests import Written, digests_of
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.targets import Part, Shards
from stagereg.errors import CheckpointError, RankMismatchError, SaveTimeoutError, name_ranks

WAITING_FOR_OTHERS = "waiting for the other ranks"  # the action of a rank that has finished its own work

_log = logging.getLogger(__name__)

_TRYING = 0.5  # fraction of the timeout for the write; the rest is for cleanup and reports


class ExchangeCache:
    """The results of a target's last save, so that ranks send only changes. Used by the target's thread."""

    def __init__(self, repeats: bool) -> None:
        self.plans, self.results = Exchange(repeats), Exchange(repeats)
        self.planner = planning.StatePlanner()
        self.plan: SavePlan | None = None  # the plan of this rank
        self.sent: list[SavePlan] = []  # the same plan, in the form that is sent to rank 0
        self.nbytes = 0  # bytes of the rank's tensors, without random number generators
        self.dealt: SavePlan | None = None  # the plan that rank 0 assigned to this rank
        self.entries: Structures = {}  # on rank 0: the entries of all ranks
        self.described = ""  # on rank 0: the tables of the index, as JSON
        self.readable = Readable()  # on rank 0: the validated parts of the index
        self.was_read_back = False  # whether a save was read back before its commit

    def forget(self) -> None:
        """Clear the cache after a save that was skipped or has failed, so that the next save sends everything."""
        self.plans.forget()
        self.results.forget()
        self.entries = {}


class _Prepared(NamedTuple):
    """The message that a rank sends with its plan after staging."""

    step: int
    called: bool = True
    follows: bool = False
    taken: Mapping[str, int] = {}
    asks: bool = False  # whether the ranks must compare replicas first
    post: Any = None  # this rank's message for comparing replicas
    digests: Mapping[str, bytes] = {}  # digests of the structures of the rank's entries


class _RankFiles(NamedTuple):
    """The message that a rank sends after it has written its files."""

    marks: dict[str, FileDigest]
    structures: Sent
    digests: dict[Written, int]  # CRC-32 of values that rank 0 reads back


def write_and_commit(write: Write, cache: ExchangeCache) -> tuple[float, int] | None:
    """Write a copy to a target and commit the checkpoint. Collective. Called on the thread of the target.

    Return the time when all ranks had staged (``record.now``), and the size of this rank's files in bytes; ``None`` if
    the target skips the save, or if the save to an optional target has failed. Raises: ``CheckpointError`` on all ranks
    if the write failed on any.
    """
    copy, target, done = write.copy, write.target, None
    try:
        if write.is_first:
            work = _Work(write, cache)
        else:
            write.at = "waiting for the first target"
            work = _Work(write, cache, copy.prepared.result())
        try:
            done = work.run()
        except CheckpointError as error:
            if target.required or not write.agreed:
                raise
            log = _log.warning if target.ranks.rank == 0 else _log.debug
            log("stagereg: %s. Training continues without a checkpoint in %s.", str(error).rstrip("."), target.where)
            record.emit("lost", step=write.request.step, dir=target.where, error=str(error))
        finally:
            if write.is_first and write.agreed:
                copy.replicas.ended(None)
                if not write.is_last:  # the result would keep the copy alive
                    copy.prepared.set_result((Shards(work.entries, work.parts), work.own))
        if write.is_first and not write.agreed:  # the save is skipped, and no other target needs the copy
            copy.replicas.ended(None)
    except BaseException as error:
        if write.is_first and not write.agreed:
            copy.replicas.ended(error)
            copy.prepared.set_exception(error)
        raise
    finally:
        write.leave_copy()
        if write.is_last:
            copy.record()
    return done


class _Work:
    """Writes one copy on its target's thread. All ranks call :meth:`prepare` and :meth:`write`; rank 0 replies to both.

    ``prepared``: the copy as the first target has prepared it; ``None`` if this is the first target.
    """

    own: RankEntries  # this rank's values of all entries
    entries: dict[str, Any]  # the entries that this rank writes
    parts: Mapping[str, Part | None]  # for each tensor that is a shard: its offsets in the whole tensor
    asked: Asked  # the structures that rank 0 requests from this rank
    _plans: list[SavePlan]  # this rank's plan, in the form that is sent to rank 0
    _more: list[SavePlan]  # the same plan, if rank 0 did not receive it before the files were written
    _results: list[WriteResult]

    def __init__(self, write: Write, cache: ExchangeCache, prepared: tuple[Shards, RankEntries] | None = None) -> None:
        self._write, self._cache, self._to, self._ranks = write, cache, write.target, write.target.ranks
        self.planner = cache.planner  # holds the tensors until they are written
        self._metadata: Metadata | None = None
        self._asks = False  # whether the ranks compare replicas before they plan
        self._reads_back = self._to.read_back is not None and not cache.was_read_back
        self.entries = {}
        if prepared is not None:
            shards, self.own = prepared
            self.entries, self.parts = shards.entries, shards.parts

    def run(self) -> tuple[float, int] | None:
        write, to, cache, step = self._write, self._to, self._cache, self._write.request.step
        failing = f"Step {step} was not saved"
        try:
            with within(_TRYING * (write.until - time.monotonic())), short_turns():
                self._path, skips = to.begin(step)
                if skips and write.is_last:
                    if not write.request.missed:
                        self._release_copy()
                    return None
                answer = cache.plans.round_trip(self._ranks, failing, self.prepare, self.share_out)
                if self._asks:
                    take = partial(self._take_shards, answer)
                    answer = cache.plans.round_trip(self._ranks, failing, take, self.share_out)
                self.take_answer(answer)
                write.agreed, began = True, record.now()
                if skips:
                    cache.forget()
                    return None
                nbytes = cache.results.round_trip(self._ranks, failing, self.write, self.commit)
                to.complete(step)
                cache.was_read_back = True
                failpoint("ended")
        except BaseException:
            cache.forget()
            with within(write.until - time.monotonic()):
                to.discard(step)
            raise
        finally:
            self.planner.state_dict = {}
        return began, nbytes

    def prepare(self) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        """Return this rank's message to rank 0 after staging, with its plan or with the replicas to compare first."""
        request, copy = self._write.request, self._write.copy
        if request.missed:
            return _Prepared(request.step, False), (), ()
        if not self._write.is_first:
            return self._plan(Shards(self.entries, self.parts))
        self._write.at = "waiting for the staged copy"
        staged = copy.get()
        if copy.outline is not None:
            expect_same_structure(copy.outline, staged, copy.stager)
        state = dict(staged)
        copy.inspect(state)
        if (generators := rng_name(self._ranks.number)) in state:
            state[generators] = rng.as_tensors(state[generators])
        self.entries = copy.replicas.cut(state)
        self.own = RankEntries(self.entries)  # raises for values that cannot be saved
        copy.nbytes = self._nbytes(state, (x for _, x in walk({name: state[name] for name in self.entries})))
        found = copy.replicas.post(self.own.objects)
        failpoint("staged")
        if isinstance(found, Shards):
            return self._plan(found)
        self._write.at, self._asks = WAITING_FOR_OTHERS, True
        return self._sent(found.post), (found.lasting,), ()

    def _take_shards(self, answer: Any) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        self._asks = False
        return self._plan(self._write.copy.replicas.take(answer))

    def _sent(self, post: Any) -> _Prepared:
        request = self._write.request
        return _Prepared(request.step, True, request.follows, request.taken, self._asks, post, self.own.digests())

    def _plan(self, shards: Shards) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        write, cache, storage, entries = self._write, self._cache, self._to.storage, shards.entries
        self.entries, self.parts = entries, shards.parts
        write.at = "preparing its files"
        self._to.expect_new(self._path)
        storage.reset(self._path)
        is_first = self._ranks.rank == 0
        self.planner.parts = self.parts
        self.planner.set_up_planner(entries, storage.storage_meta(), is_first)
        takes_more = "kwargs" in inspect.signature(storage.set_up_storage_writer).parameters  # like torch
        more = {"rank": self._ranks.rank, "use_collectives": True} if takes_more else {}
        storage.set_up_storage_writer(is_first, **more)
        plan = storage.prepare_local_plan(self.planner.create_local_plan())
        if plan is not cache.plan:
            cache.nbytes = self._nbytes(entries, self.planner.state_dict.values())
            cache.plan = plan
            cache.sent = [plan] if self._ranks.size == 1 else planning.split_plan(plan, self._ranks.number)
        self._plans = cache.sent
        write.at = WAITING_FOR_OTHERS
        return self._sent(shards.post), (*self._plans, (write.request.follows, self.own.kinds)), ()

    def _nbytes(self, copy: Mapping[str, Any], leaves: Iterable[Any]) -> int:
        """Return the bytes of tensor data in a copy, without the states of this rank's random number generators."""
        own: Mapping[str, torch.Tensor] = copy.get(rng_name(self._ranks.number), {})
        return sum(part.nbytes for x in leaves for part in _parts(x)) - sum(x.nbytes for x in own.values())

    def share_out(self, prepared: Sequence[_Prepared], lasting: Sequence[Sequence[Any]] | None) -> Sequence[Any]:
        """Return rank 0's reply to each rank: the rank's plan (``None``: its last plan), and the structures to send.

        If the ranks must compare replicas first, each reply is the result of the comparison instead.
        """
        steps = [each.step for each in prepared]
        _expect_all_called(self._write.request.step, prepared)
        if len(set(steps)) > 1:
            for step in steps:
                self._to.discard(step)
            raise RankMismatchError(f"The ranks saved different steps at the same time: {steps}.")
        _expect_all_up_to_date(prepared)
        replicas, posts = self._write.copy.replicas, [each.post for each in prepared]
        if all(each.asks for each in prepared):
            return replicas.answer(posts, [each for [each] in lasting or ()])
        # The first rank stores replicated numbers. Ranks that have left their loop come last: their numbers are stale.
        self._follows = [rank for rank, each in enumerate(prepared) if each.follows]
        self._order = sorted(range(len(prepared)), key=lambda rank: prepared[rank].follows)
        if self._write.is_first:
            replicas.check(posts, self._order)
        have, before = [each.digests for each in prepared], self._cache.entries
        self._merging = EntryMerger(have, self._order, self._follows, before, self._ranks.numbers)
        asked = self._merging.ask_ranks()
        if lasting is None:
            return [(None, each) for each in asked]
        given = [each[:-1] for each in lasting]
        plans = self._plan_all(given)
        dealt = self._to.storage.prepare_global_plan([plans[rank] for rank in range(len(given))])
        return list(zip(map(planning.numbered, dealt, map(planning.join_plans, given)), asked, strict=True))

    def _plan_all(self, given: Sequence[Sequence[SavePlan]]) -> dict[int, SavePlan]:
        given = _without_shared(given, self._follows)
        plans, self._metadata = self.planner.create_global_plan([x for rank in self._order for x in given[rank]])
        parts = iter(plans)
        return {rank: planning.join_plans([next(parts) for _ in given[rank]]) for rank in self._order}

    def take_answer(self, answer: tuple[SavePlan | None, Asked]) -> None:
        dealt, self.asked = answer
        self._more = self._plans if dealt is None else []
        if dealt is not None:
            self._cache.dealt = planning.from_numbers(dealt, planning.join_plans(self._plans))
            self._cache.results.forget()  # the same offsets may now have values of another dtype

    def write(self) -> tuple[_RankFiles, Sequence[Any], Sequence[Any]]:
        """Write this rank's files, and release the copy."""
        write = self._write
        failpoint("agreed")
        self._to.expect_room(self._cache.nbytes)
        write.at = "writing its files"
        own = self.planner.finish_plan(cast("SavePlan", self._cache.dealt))
        digests = digests_of(own.items, self.planner) if self._reads_back else {}
        self._results = self._to.storage.write_data(own, self.planner).wait()
        self.planner.state_dict = {}
        confirm = write.copy.confirmation()
        self._release_copy()
        # Rank 0 computes the digests of its files in commit().
        marks = self._to.marks(self._path, self._results) if self._ranks.rank > 0 else {}
        failpoint("written")
        write.at = "waiting for the proof that the state did not change during the copy"
        confirm()
        write.at = WAITING_FOR_OTHERS
        structures = {name: self.own.structures[name] for name in self.asked}
        return _RankFiles(marks, structures, digests), (tuple(self._results),), self._more

    def _release_copy(self) -> None:
        """Release the copy. Raises: the error that made staging fail."""
        write, copy = self._write, self._write.copy
        if write.is_first:
            copy.get()
        if write.is_last:
            self.entries.clear()
        write.leave_copy()
        copy.expect_complete()

    def commit(self, written: Sequence[_RankFiles], lasting: Sequence[Sequence[Any]] | None) -> list[int]:
        write, to = self._write, self._to
        write.at = "committing"
        if write.abandoned:
            raise SaveTimeoutError("the save took too long and was aborted")
        state = self._merging.put_together([each.structures for each in written])
        if lasting is None:
            again = to.finish(self._path, None, [])
        else:
            if self._metadata is None:
                self._plan_all([plans for _, *plans in lasting])
            metadata, results = cast("Metadata", self._metadata), [[*each[0]] for each in lasting]
            objects = {name for encoded in state.values() for name in encoded.objects}
            self._cache.described = json.dumps(tables(metadata, results, objects))
            planning.name_for_each(metadata, results, groups_in(state))
            again = to.finish(self._path, metadata, results)
        own = {**to.marks(self._path, self._results), **again}
        files = {name: mark for each in written for name, mark in each.marks.items()} | own
        index = make_index(self._cache.described, state)
        sizes = {name: mark.bytes for name, mark in files.items()}
        self._cache.readable = expect_readable(index, self._cache.described, state, sizes, self._cache.readable)
        if to.read_back is not None and self._reads_back:
            write.at = "reading back values from a storage of another package"
            digests = {key: digest for each in written for key, digest in each.digests.items()}
            to.read_back(to.storage, self._path, index, sizes, digests)
        to.commit(write.request.step, self._path, files, index)
        self._cache.entries = self._merging.entries
        return [sum(mark.bytes for mark in marks.values()) for marks in [own, *(each.marks for each in written[1:])]]


def _expect_all_called(step: int, prepared: Sequence[_Prepared]) -> None:
    missed = [rank for rank, each in enumerate(prepared) if not each.called]
    if missed:
        others = [rank for rank in range(len(prepared)) if rank not in missed]
        raise RankMismatchError(
            f"{name_ranks(others)} called save(step {step}), {name_ranks(missed)} did not: call save and maybe_save on "
            "all ranks, with an empty batch too, and not under `if rank == 0`."
        )


def _expect_all_up_to_date(prepared: Sequence[_Prepared]) -> None:
    """Raise ``RankMismatchError`` if a rank has left its loop, and the step counts of the ranks' optimizers differ."""
    if not any(each.follows for each in prepared):
        return
    for name in sorted({name for each in prepared for name in each.taken}):
        taken = [each.taken.get(name, 0) for each in prepared]
        if len(set(taken)) > 1:
            counts = ", ".join(f"{count} on {name_ranks([rank])}" for rank, count in enumerate(taken))
            raise RankMismatchError(
                f"{name!r} is not the same on all ranks: its number of steps is {counts}. After a rank has left the "
                "loop, it steps only the objects that the join lists: add the optimizer, the schedule or the function "
                "that steps them, as in Join([model, optimizer])."
            )


def _without_shared(given: Sequence[Sequence[SavePlan]], follows: Collection[int]) -> Sequence[Sequence[SavePlan]]:
    """Remove a tensor from the plans of ranks that have left their loop, if other ranks have the tensor too."""
    if not follows:
        return given
    active = (plan for rank, plans in enumerate(given) if rank not in follows for plan in plans)
    shared = {item.index.fqn for plan in active for item in plan.items if item.type is WriteItemType.SHARD}

    def own(plan: SavePlan) -> SavePlan:
        items = [x for x in plan.items if x.type is WriteItemType.SHARD or x.index.fqn not in shared]
        return dataclasses.replace(plan, items=items)

    return [[*map(own, plans)] if rank in follows else plans for rank, plans in enumerate(given)]


def _parts(x: Any) -> list[torch.Tensor]:
    if isinstance(x, ShardedTensor):
        return [shard.tensor for shard in x.local_shards()]
    return [*inner_tensors(x)] if isinstance(x, torch.Tensor) else []
