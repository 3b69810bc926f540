"""How all ranks together write and commit a save, in two exchanges, or three. Each is needed:

0. In a save in which ranks compare: every rank sends checksums of all that it has; rank 0 answers who has the same.
   Without it a rank would write a share of what another one has not.

1. Before any file: every rank sends that it has staged and what it would write; rank 0 answers which rank writes what.
   Without it a rank would write for nothing, or two ranks the same.
2. After the files: every rank sends what it has written, with sizes and checksums; rank 0 writes the metadata, commits
   and answers that it has. Without it a checkpoint would be committed with files missing, or a rank would not know how
   its save has ended.

A failure on any rank fails the save on all of them and deletes the hidden directory. Each rank lets go of its copy as
soon as its files are written.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

import stagereg.base.record as record
import stagereg.checkpoint.state.rng as rng
from stagereg.base.deadline import within
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.index import expect_readable, make_index, tables
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.format.wrappers import inner_tensors
from stagereg.checkpoint.ranks.merging import Asked, EntryDigests, EntryMerger, RankEntries, Sent, groups_in
from stagereg.checkpoint.save.pending_save import PendingSave
from stagereg.checkpoint.save.scheduling import short_turns
from stagereg.checkpoint.save.state_planner import from_numbers, join_plans, name_for_each, numbered, split_plan
from stagereg.checkpoint.save.structure import expect_same_structure
from stagereg.checkpoint.state.entries import rng_name
from stagereg.checkpoint.storage.digests import Written, digests_of
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, RankMismatchError, SaveTimeoutError, name_ranks
from stagereg.extensions.replicas.comparing import Compared, EntryContents, compare, content_digests, expect_alike
from stagereg.extensions.replicas.shares import SAMPLES, ReplicaShards, Shares, cut, shares

WAITING_FOR_OTHERS = "waiting for the others"  # what a rank that has done its part is doing

_log = logging.getLogger(__name__)

_COMPARING = -1  # in place of the number of the save in which ranks have compared
_TRYING = 0.5  # of the time-out; the rest is for clearing away and reporting


class _Prepared(NamedTuple):
    """What a rank sends with its plan when it has staged."""

    step: int
    called: bool = True
    follows: bool = False
    taken: Mapping[str, int] = {}
    shares_of: int | None = None
    contents: Mapping[tuple[str, bytes], bytes] = {}
    digests: EntryDigests = EntryDigests({}, {})
    differing: Sequence[EntryContents] = ()


class _RankFiles(NamedTuple):
    """What a rank sends when it has written its files."""

    marks: dict[str, FileDigest]
    structures: Sent
    digests: dict[Written, int]  # of what it gave to the storage, if that is read back


def write_and_commit(save: PendingSave) -> tuple[float, int] | None:
    """Write a save and commit it. Collective; on the background thread.

    Returns:
        When all ranks had staged (``record.now``), and the bytes of this rank's files; ``None`` if its target has
        passed over it.

    Raises:
        CheckpointError: on all ranks, if it failed on any.
    """
    book = None if save.before is not None else save.sharing.book
    try:
        if save.before is not None:
            save.at = "waiting for the tier"
        work = _Work(save, None if save.before is None else cast("Future[_Work]", save.before.agreed).result())
        try:
            done = work.run()
        except CheckpointError as error:
            if save.to.required or not work.agreed:
                raise
            log, done = _log.warning if save.to.ranks.rank == 0 else _log.debug, None
            log("stagereg: %s. Training goes on without it in %s.", str(error).rstrip("."), save.to.where)
            record.emit("lost", step=save.step, dir=save.to.where, error=str(error))
        finally:
            if work.agreed and book is not None:
                book.end_save(save.sharing.number, save.sharing.shares if save.sharing.compares else None)
                book = None
            if work.agreed and save.agreed is not None:
                save.agreed.set_result(work)
        if book is not None:  # passed over
            book.end_save(save.sharing.number)
    except BaseException as error:
        if book is not None:
            book.end_save(save.sharing.number, failed=True)
        if save.agreed is not None and not save.agreed.done():
            save.agreed.set_exception(error)
        raise
    finally:
        if save.agreed is None:
            save.copy.drop()
    return done


class _Work:
    """One save on the background thread: all ranks :meth:`prepare` and :meth:`write`, and rank 0 answers them.

    ``before`` is that of the same copy to the tier, which has taken it apart already.
    """

    agreed: bool  # all ranks have staged, and know which shares of the copy each of them writes
    entries: RankEntries  # what this rank has of each entry
    asked: Asked  # what rank 0 asks it for
    _copy: dict[str, Any]  # what this rank writes of what it has staged
    _plans: list[SavePlan]  # what this rank would write
    _more: list[SavePlan]  # that again, if it was not sent before the files
    _results: list[WriteResult]

    def __init__(self, save: PendingSave, before: _Work | None) -> None:
        self._save, self._to, self._ranks = save, save.to, save.to.ranks
        self.planner = save.to.last.planner  # has the tensors until they are written
        self._metadata: Metadata | None = None
        self._is_second = self.agreed = before is not None
        if before is not None:
            self._copy, self.entries = before._copy, before.entries
            before._copy = {}

    def run(self) -> tuple[float, int] | None:
        save, to, last = self._save, self._to, self._to.last
        failing = f"Step {save.step} was not saved"
        try:
            with within(_TRYING * (save.until - time.monotonic())), short_turns():
                self._path, passed_over = to.begin(save.step)
                if passed_over and save.agreed is None:
                    if not save.missed:
                        self._let_go()
                    return None
                answer = last.plans.round_trip(self._ranks, failing, self.prepare, self.share_out)
                if save.sharing.compares and not self._is_second:
                    prepare = partial(self.prepare_shares, answer)
                    answer = last.plans.round_trip(self._ranks, failing, prepare, self.share_out)
                self.take_answer(answer)
                self.agreed, began = True, record.now()
                if passed_over:
                    last.forget()
                    return None
                nbytes = last.results.round_trip(self._ranks, failing, self.write, self.commit)
                to.complete(save.step)
                to.read_back = None
                failpoint("ended")
        except BaseException:
            last.forget()
            with within(save.until - time.monotonic()):
                to.discard(save.step)
            raise
        finally:
            self.planner.state_dict = {}
        return began, nbytes

    def prepare(self) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        """Return that this rank has staged, and what it would write, or what it compares before."""
        save = self._save
        if save.missed:
            return _Prepared(save.step, False), (), ()
        if self._is_second:
            return self._plan(save.sharing.shares)
        save.at = "waiting for its copy"
        staged = save.copy.get()
        if save.copy.outline is not None:
            expect_same_structure(save.copy.outline, staged, save.copy.stager)
        copy = dict(staged)
        save.copy.inspect(copy)
        if (generators := rng_name(self._ranks.number)) in copy:
            copy[generators] = rng.as_tensors(copy[generators])
        self._copy = self._cut(copy) if save.sharing.shares is None and save.sharing.book is not None else copy
        own = save.sharing.shares
        buffers = save.sharing.buffers if save.sharing.compares or own is not None else None
        # Values that are new since the ranks compared are compared in each save, and not shared. It refuses what cannot
        # be saved.
        self.entries = RankEntries(self._copy, buffers, () if own is None else own.names)
        failpoint("staged")
        if not save.sharing.compares:
            return self._plan(own, [*self.entries.contents.values()])
        save.at = WAITING_FOR_OTHERS
        contents = self.entries.contents
        sent = _Prepared(save.step, True, save.follows, save.taken, _COMPARING, content_digests(contents))
        names = {kind: [piece.name for piece in each.pieces] for kind, each in contents.items()}
        return sent, (names,), ()

    def _cut(self, copy: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shares of a copy that was not cut when it was staged; all of it, if ranks compare."""
        save = self._save
        save.copy.nbytes = self._nbytes(copy, (x for _, x in walk(copy)))
        found = cast("ReplicaShards", save.sharing.book).cut(save.sharing.number, copy)
        save.sharing.compares = found is None
        copy, save.sharing.shares = found or (copy, None)
        return copy

    def prepare_shares(self, compared: Compared) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        """Return what this rank would write, once it knows what others have as well."""
        save, contents = self._save, self.entries.contents
        save.sharing.shares = shares(save.sharing.number, contents, compared, save.sharing.replicated)
        if (found := cut(self._copy, save.sharing.shares)) is None:  # a container has other keys than texts
            save.sharing.shares, found = save.sharing.shares._replace(cuts={}, parts={}, first={}), self._copy
        self._copy = found
        return self._plan(save.sharing.shares, [contents[kind] for kind in compared.differing])

    def _plan(
        self, own: Shares | None, differing: Sequence[EntryContents] = ()
    ) -> tuple[_Prepared, Sequence[Any], Sequence[Any]]:
        save, storage, copy = self._save, self._to.storage, self._copy
        save.at = "preparing its files"
        self._to.expect_new(self._path)
        storage.reset(self._path)
        is_first = self._ranks.rank == 0
        self.planner.parts = {} if own is None else own.parts
        self.planner.set_up_planner(
            {name: copy[name] for name in copy if name != SAMPLES}, storage.storage_meta(), is_first
        )
        takes_more = "kwargs" in inspect.signature(storage.set_up_storage_writer).parameters  # as torch asks
        more = {"rank": self._ranks.rank, "use_collectives": True} if takes_more else {}
        storage.set_up_storage_writer(is_first, **more)
        plan = storage.prepare_local_plan(self.planner.create_local_plan())
        if plan is not self._to.last.plan:
            self._to.last.nbytes = self._nbytes(copy, self.planner.state_dict.values())
            self._to.last.plan = plan
            self._to.last.sent = [plan] if self._ranks.size == 1 else split_plan(plan, self._ranks.number)
        self._plans = self._to.last.sent
        if save.copy.nbytes is None:
            save.copy.nbytes = self._to.last.nbytes
        save.at = WAITING_FOR_OTHERS
        digests = self.entries.digests()
        of = None if own is None else own.found_in
        sent = _Prepared(save.step, True, save.follows, save.taken, of, {}, digests, differing)
        return sent, (*self._plans, (save.follows, self.entries.kinds)), ()

    def _nbytes(self, copy: Mapping[str, Any], leaves: Iterable[Any]) -> int:
        """Return the bytes of tensor data in a copy, without this rank's random number generators."""
        own: Mapping[str, torch.Tensor] = copy.get(rng_name(self._ranks.number), {})
        return sum(part.nbytes for x in leaves for part in _parts(x)) - sum(x.nbytes for x in own.values())

    def share_out(self, prepared: Sequence[_Prepared], lasting: Sequence[Sequence[Any]] | None) -> Sequence[Any]:
        """Return what each rank writes, ``None`` for the same as in the save before, and what it is asked for.

        If they compare before that, return the :class:`.Compared` of each.
        """
        steps = [each.step for each in prepared]
        _expect_all_called(self._save.step, prepared)
        if len(set(steps)) > 1:
            for step in steps:
                self._to.discard(step)
            raise RankMismatchError(f"The ranks saved different steps at the same time: {steps}.")
        _expect_all_up_to_date(prepared)
        if len({each.shares_of for each in prepared}) > 1:
            raise RankMismatchError(
                "The ranks disagree on which of them writes which part of the shared state. Nothing was written. Save "
                "again: one of the next two saves compares all values."
            )
        sharing = self._save.sharing
        if prepared[0].shares_of == _COMPARING:
            names = (name for [each] in lasting or () for held in each.values() for name in held)
            cast("ReplicaShards", sharing.book).note_compared(sharing.number, names)
            return compare([each.contents for each in prepared], [names for [names] in lasting or ()])
        # Of what several ranks have alike the first one's is stored: numbers are stale on one that has left its loop.
        self._follows = [rank for rank, each in enumerate(prepared) if each.follows]
        self._order = sorted(range(len(prepared)), key=lambda rank: prepared[rank].follows)
        if sharing.shares is not None and sharing.book is not None and not sharing.compares:
            new = ((rank, piece.name) for rank in self._order for x in prepared[rank].differing for piece in x.pieces)
            sharing.book.expect_not_compared(sharing.shares.found_in, new)
        expect_alike({rank: prepared[rank].differing for rank in self._order})
        have, before = [each.digests for each in prepared], self._to.last.entries
        self._merging = EntryMerger(have, self._order, self._follows, before, self._ranks.numbers)
        asked = self._merging.ask_ranks()
        if lasting is None:
            return [(None, each) for each in asked]
        given = [each[:-1] for each in lasting]
        plans = self._plan_all(given)
        dealt = self._to.storage.prepare_global_plan([plans[rank] for rank in range(len(given))])
        return list(zip(map(numbered, dealt, map(join_plans, given)), asked, strict=True))

    def _plan_all(self, given: Sequence[Sequence[SavePlan]]) -> dict[int, SavePlan]:
        given = _without_shared(given, self._follows)
        plans, self._metadata = self.planner.create_global_plan([x for rank in self._order for x in given[rank]])
        parts = iter(plans)
        return {rank: join_plans([next(parts) for _ in given[rank]]) for rank in self._order}

    def take_answer(self, answer: tuple[SavePlan | None, Asked]) -> None:
        dealt, self.asked = answer
        self._more = self._plans if dealt is None else []
        if dealt is not None:
            self._to.last.dealt = from_numbers(dealt, join_plans(self._plans))
            self._to.last.results.forget()  # the same places may hold something else: of another dtype

    def write(self) -> tuple[_RankFiles, Sequence[Any], Sequence[Any]]:
        """Write this rank's files, and let go of its copy."""
        save = self._save
        failpoint("agreed")
        self._to.expect_room(self._to.last.nbytes)
        save.at = "writing its files"
        own = self.planner.finish_plan(cast("SavePlan", self._to.last.dealt))
        digests = digests_of(own.items, self.planner) if self._to.read_back is not None else {}
        self._results = self._to.storage.write_data(own, self.planner).wait()
        self.planner.state_dict = {}
        self._let_go()
        marks = (
            self._to.marks(self._path, self._results) if self._ranks.rank > 0 else {}
        )  # those of rank 0 come with the metadata's
        failpoint("written")
        save.at = "waiting until no operation can have written the state meanwhile"
        save.copy.confirm()
        save.at = WAITING_FOR_OTHERS
        sent = _RankFiles(marks, self.entries.structures_for(self.asked), digests)
        return sent, (tuple(self._results),), self._more

    def _let_go(self) -> None:
        """Let go of the copy, unless it is written elsewhere as well. Raises: what it has proved bad with."""
        copy = self._save.copy
        if self._save.agreed is None:
            staged, copy.staged, self._copy = copy.get(), {}, {}
            copy.release(staged)
            del staged
        copy.settled.wait()
        copy.get()
        copy.record(self._save.step)

    def commit(self, written: Sequence[_RankFiles], lasting: Sequence[Sequence[Any]] | None) -> list[int]:
        save, to = self._save, self._to
        save.at = "committing"
        if save.abandoned:
            raise SaveTimeoutError("it took too long and was given up")
        state = self._merging.put_together([each.structures for each in written])
        if lasting is None:
            again = to.finish(self._path, None, [])
        else:
            if self._metadata is None:
                self._plan_all([plans for _, *plans in lasting])
            metadata, results = cast("Metadata", self._metadata), [[*each[0]] for each in lasting]
            objects = {name for encoded in state.values() for name in encoded.objects}
            to.last.described = json.dumps(tables(metadata, results, objects))
            name_for_each(metadata, results, groups_in(state))
            again = to.finish(self._path, metadata, results)
        own = {**to.marks(self._path, self._results), **again}
        files = {name: mark for each in written for name, mark in each.marks.items()} | own
        index = make_index(to.last.described, state)
        sizes = {name: mark.bytes for name, mark in files.items()}
        to.last.readable = expect_readable(index, to.last.described, state, sizes, to.last.readable)
        if to.read_back is not None:
            save.at = "reading back what a storage of another package wrote"
            digests = {key: digest for each in written for key, digest in each.digests.items()}
            to.read_back(to.storage, self._path, index, sizes, digests)
        to.commit(save.step, self._path, files, index)
        to.last.entries = self._merging.entries
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
    """Refuse what a rank holds from long ago that has left its loop, and steps only what the join knows."""
    if not any(each.follows for each in prepared):
        return
    for name in sorted({name for each in prepared for name in each.taken}):
        taken = [each.taken.get(name, 0) for each in prepared]
        if len(set(taken)) > 1:
            counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(taken))
            raise RankMismatchError(
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
    if isinstance(x, ShardedTensor):
        return [shard.tensor for shard in x.local_shards()]
    return [*inner_tensors(x)] if isinstance(x, torch.Tensor) else []
