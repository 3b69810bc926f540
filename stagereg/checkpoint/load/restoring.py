"""Chooses a checkpoint to resume from, and loads it into the objects of a run.

Rank 0 lists the store. Each rank reads its share of the files (of those of its machine, if each machine has a disk of
its own) and compares the content with the manifest. A file that cannot be accessed is an error, not damage. Every rank
opens and reads what does not go straight into a live tensor; then the ranks agree, and no object changes before.

From an object store or a network file system one rank reads each byte and checks it on the way (:mod:`.shared_read`),
so objects may have changed in part when damage is found. The checkpoint before then overwrites all of that.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.placing as placing
import stagereg.checkpoint.load.replaced as replaced
import stagereg.checkpoint.load.seeding as seeding
import stagereg.checkpoint.load.sharing as sharing
import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
from stagereg.base.machine import machine_name
from stagereg.checkpoint.format.damage import VerificationResult, share_of_rank
from stagereg.checkpoint.format.encoding import fill, marks
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.load.findings import MergedScan, ScanResult, condition_of, together
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.state.name_map import NameMap
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import backend_of, open_parent_store
from stagereg.errors import CheckpointError, CorruptCheckpointError, kind_of, listed, reason
from stagereg.extensions.buckets.shared_read import SharedRead, shared_index
from stagereg.extensions.interop.matching import MatchedFiles
from stagereg.extensions.interop.plain_dcp import is_plain_dcp
from stagereg.extensions.recovery.crashes import CrashCounter, RestoreRecord, is_in_order
from stagereg.extensions.tiers.files import TierFiles
from stagereg.extensions.tiers.inventory import TierStep
from stagereg.extensions.tiers.near import LocalTier
from stagereg.stagers.guard import announce_write

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreRequest:
    store: CheckpointStore  # the directory of checkpoints
    resume: str  # ``"auto"``, ``"latest"`` or the path of a checkpoint
    verify: str  # ``"full"`` looks at the content of every file first, ``"fast"`` at manifest and sizes
    read: str  # ``"each"``, ``"once"`` or ``"auto"``, as ``Checkpointer`` has it
    cast: bool  # whether what was saved is converted to the dtypes of the objects
    exact: bool  # whether checkpoints that lack values of failed ranks are skipped or refused
    state: MutableMapping[str, Any]  # as given to ``Checkpointer.restore``
    own: Storage  # the checkpointer's storage
    ranks: RankGroup  # who restores
    names: ParameterNames  # of the parameters of ``state``
    ready: Callable[[], object]  # called first; what it raises keeps all ranks from restoring
    counter: CrashCounter  # of the crashes after checkpoints of this run's directory
    rename: Mapping[str, str]  # saved names, and the names here
    allow_missing: Sequence[str]  # names of entries and parameters that stay as they are if they were not saved
    near: LocalTier | None = None  # the tier of the run
    touched: list[str] = field(default_factory=list)  # the paths of checkpoints that have got into objects in part
    twins: dict[str, list[int]] = field(default_factory=dict)  # of :func:`.lowest_twins`, as it was before the restore


def restore(asked: RestoreRequest) -> Checkpoint | None:
    """Load what ``asked.resume`` stands for into the objects and values of ``asked.state``. Collective.

    With ``"auto"`` a damaged checkpoint is skipped, with a warning, before any object changes; with ``read="once"`` the
    next one overwrites what the damaged one has changed.

    Returns:
        The checkpoint, or ``None`` if ``resume`` is ``"auto"`` and there is nothing to resume from.

    Raises:
        CheckpointError: on all ranks: the checkpoint is missing or damaged; ``"auto"`` found no good one; some rank's
            objects do not take the state; reading failed after the check, and the objects have changed in part.
    """
    announce_write()  # also into what a step has left, which is not whole then
    try:
        return _tried(asked)
    except CheckpointError as error:
        if is_in_order(error):  # it was refused, and crashed nothing
            asked.counter.leave()
        if not asked.touched:
            raise
        raise kind_of([error])(
            f"{str(error).rstrip()}\nThe objects hold a mixture of what they had and what was read of "
            f"{asked.touched[0]}, since read=once checks on the way: do not train with them; restore another "
            "checkpoint, or start anew."
        ) from error


def _tried(asked: RestoreRequest) -> Checkpoint | None:
    store, resume, ranks = asked.store, asked.resume, asked.ranks
    where = resume if resume not in ("auto", "latest") else store.root
    near = asked.near if asked.near and (resume in ("auto", "latest") or asked.near.names(resume)) else None
    steps = {} if near is None else {near.path_of(each): each for each in near.steps()}

    def look() -> _Seen:
        asked.ready()
        if near is not None and ranks.rank == 0:
            listed = choosing.candidates_near(store, resume, steps, near.branch_of)
        else:
            listed = choosing.candidates(store, resume) if ranks.rank == 0 else []
        shared = backend_of(where).shared
        return _Seen(listed, asked.counter.note(), machine_name(), shared, seeding.seeds_of(asked.state))

    def answer(
        seen: list[_Seen],
    ) -> list[tuple[list[VerificationResult], _Machines, RestoreRecord | None, dict[str, list[int]]]]:
        asked.counter.take_note([each.note for each in seen])
        listed = choosing.without_quarantined(store, resume, asked.counter, seen[0].listed, steps)
        listed = choosing.without_inexact(listed, resume) if asked.exact else listed
        twins = seeding.lowest_twins([each.seeds for each in seen])
        return [(listed, _machines(seen), asked.counter.note(), twins)] * ranks.size

    listed, machines, note, twins = ranks.round_trip(f"Nothing was restored from {where}", look, answer, ranks.limit)
    asked.counter.take_note([note])
    asked.twins.update(twins)
    if resume == "auto":
        choosing.warn_of_damaged([each for each in listed if each.damages], ranks)
    passed: list[VerificationResult] = []
    for condition in listed:
        candidate = condition.checkpoint
        if candidate is not None:
            step = steps.get(candidate.path)
            parent = store if step or resume in ("auto", "latest") else open_parent_store(candidate.path)
            reads = ranks.rank == 0 and step is None
            with parent.readers.reading(candidate.path) if reads else nullcontext():
                asked.counter.begin_restore(parent, candidate, near=step is not None)
                if near is not None and step is not None:
                    condition = _NearAttempt(near, step, candidate, machines, asked).run()
                else:
                    condition = _Attempt(parent, candidate, machines, asked).run()
            if not condition.damages:
                choosing.log_fallback(candidate, passed, ranks)
                return candidate
            parent.retention.distrusted.add(candidate.path)
            if resume == "auto":
                choosing.warn_of_damaged([condition], ranks)
        passed.append(condition)
    if not passed:
        asked.counter.forget()
        return None
    root = store.root if near is None or near.shared else os.path.dirname(near.folder.path)
    raise choosing.nothing_good(root, passed) if resume == "auto" else choosing.not_that_one(resume, passed[0])


class _Seen(NamedTuple):
    """What rank 0 has listed, the note of crashes, whether all machines see the files, and how a rank is seeded."""

    listed: list[VerificationResult]
    note: RestoreRecord | None
    machine: str
    shared: bool
    seeds: Mapping[str, str]


class _Machines(NamedTuple):
    """The ranks by who sees the same files, those of a machine or all; and whether all do."""

    ranks: list[list[int]]
    shared: bool


def _machines(seen: Sequence[_Seen]) -> _Machines:
    if any(each.shared for each in seen):
        return _Machines([[*range(len(seen))]], True)
    by_name: dict[str, list[int]] = {}
    for rank, each in enumerate(seen):
        by_name.setdefault(each.machine, []).append(rank)
    return _Machines([*by_name.values()], False)


# -- reading it


class _Attempt:
    """The restoring of one checkpoint, on all ranks together. Nothing has changed until its path is in ``touched``."""

    def __init__(self, store: CheckpointStore, chosen: Checkpoint, machines: _Machines, asked: RestoreRequest) -> None:
        passed_on = asked.read == "once" or (asked.read == "auto" and machines.shared and asked.ranks.size > 1)
        self._once = passed_on and INDEX in chosen.manifest.files
        # With ``once`` each byte is checked as it is read, and reading all of them before would be in vain.
        self._checks = asked.verify == "full" and not self._once
        self._store, self._chosen, self._machines, self._asked = store, chosen, machines, asked
        self._ranks, self._failing = asked.ranks, f"{chosen.path} could not be restored"
        self._loading = _Loading(chosen, asked, self._once)
        self._failure: Exception | None = None  # of this rank; not raised before all know whether files are damaged

    def run(self) -> VerificationResult:
        """Restore the checkpoint, or return what is wrong with its files. Collective. Raises: ``CheckpointError``."""
        with ExitStack() as opened:
            found, condition = self._exchange(partial(self._prepare, opened, self._shared_index()))
            if self._checks and condition.damages:
                return condition
            failed = found.failed or self._take_rests(found)
            if self._once and not failed:
                damages = self._read_once()
                if damages:
                    return VerificationResult(self._chosen.path, self._chosen.manifest, damages)
                failed = self._failure is not None
            if failed:
                # What could not be read may be damaged: then it is passed over, and is no error.
                _, condition = self._exchange(self._check)
                if condition.damages:
                    return condition
                self._ranks.run_on_all(self._failing, partial(_raise, self._failure))
            self._assign()
        return VerificationResult(self._chosen.path, self._chosen.manifest)

    def _assign(self) -> None:
        seeded = self._ranks.run_on_all(self._failing, self._loading.assign)
        if self._ranks.rank == 0:
            choosing.warn_of_inexact(self._chosen, seeded, self._asked.state)

    def _exchange(self, look: Callable[[], ScanResult]) -> tuple[MergedScan, VerificationResult]:
        def answer(looked: list[ScanResult]) -> list[MergedScan]:
            return [together(self._chosen, self._machines.ranks, looked)] * self._ranks.size

        found = self._ranks.round_trip(self._failing, look, answer, self._ranks.limit)
        return found, condition_of(self._store, self._chosen, self._ranks, found)

    def _check(self) -> ScanResult:
        """Read this rank's share of the files that the ranks of its machine see."""
        [own] = [machine for machine in self._machines.ranks if self._ranks.rank in machine]
        parts = share_of_rank(self._chosen.manifest.files, own.index(self._ranks.rank), len(own))
        return ScanResult(self._store.contents(self._chosen.path, parts))

    def _prepare(self, opened: ExitStack, index: bytes | None) -> ScanResult:
        looked = self._check() if self._checks else ScanResult({})
        try:
            if self._failure is None:
                self._loading.prepare(opened, index)
        except Exception as error:
            self._failure = self._loading.names.explain(error)
        loading = self._loading
        left = {name: [*rest] for name, rest in loading.left.items()}
        missing, unused = loading.names.all_missing(), loading.names.unused
        return ScanResult(looked.marks, self._failure is None, left, missing, unused)

    def _shared_index(self) -> bytes | None:
        try:
            return shared_index(self._chosen, self._ranks) if self._once else None
        except CheckpointError as error:  # on all ranks
            self._failure = error
            return None

    def _take_rests(self, found: MergedScan) -> bool:
        """Have objects take what no rank takes, if there is something; whether that fails on some rank."""
        self._loading.missing = found.missing
        if not any(found.rests.values()) and not found.unused:
            return False
        try:
            self._loading.take_rests(found)
        except Exception as error:
            self._failure = error
        return any(self._ranks.run_on_all(self._failing, lambda: self._failure is not None))

    def _read_once(self) -> Mapping[str, str]:
        """Read each byte on one rank, which checks it, into the objects of all; return what is wrong with files."""
        loading, full = self._loading, self._asked.verify == "full"
        try:
            shared_read = SharedRead(self._chosen, loading.files, loading.transfer, self._ranks, full)
            self._asked.touched.append(self._chosen.path)
            return shared_read.run()
        except CheckpointError as error:  # on all ranks
            self._failure = error
            return {}


class _NearAttempt(_Attempt):
    """That of a step in the tier: each rank gets what it needs, checked, from the nearest machine that has it."""

    def __init__(
        self, near: LocalTier, step: TierStep, chosen: Checkpoint, machines: _Machines, asked: RestoreRequest
    ) -> None:
        super().__init__(asked.store, chosen, machines, asked)
        self._near, self._step = near, step
        self._once = self._checks = False
        self._loading = _Loading(chosen, asked, once=False)

    def run(self) -> VerificationResult:
        """Restore it, or return why no machine has all of it as it was staged. Collective. Raises as others."""
        with ExitStack() as opened:
            reader = opened.enter_context(self._near.reading(self._step))
            self._loading.open_files = lambda: TierFiles(self._chosen.path, reader)
            found, _ = self._exchange(partial(self._prepare, opened, None))
            if found.failed or self._take_rests(found):
                own = str(self._failure) if isinstance(self._failure, CorruptCheckpointError) else ""
                texts = self._ranks.run_on_all(self._failing, lambda: own)
                if damages := {f"rank {rank}": text for rank, text in enumerate(texts) if text}:
                    return VerificationResult(self._chosen.path, self._chosen.manifest, damages)
                self._ranks.run_on_all(self._failing, partial(_raise, self._failure))
            self._assign()
            self._near.restored(self._step, self._ranks.run_on_all(self._failing, lambda: reader.found))
        return VerificationResult(self._chosen.path, self._chosen.manifest)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


class _Loading:
    """What this rank takes of a checkpoint."""

    files: CheckpointFiles  # of the checkpoint, from :meth:`prepare` on
    transfer: Transfer  # what goes straight into the objects; with ``once`` all, which is read before :meth:`assign`

    def __init__(self, chosen: Checkpoint, asked: RestoreRequest, once: bool) -> None:
        self._chosen, self._asked, self._once = chosen, asked, once
        self.open_files: Callable[[], CheckpointFiles] | None = None  # in place of those in the directory
        self._found: dict[str, Any] = {}
        self._seeding: seeding.Seeding | None = None  # if the checkpoint has no generators of this rank
        self._sources: dict[int, str] = {}  # by rank, the generators that it reads instead
        # By entry what this rank does not take of it, by the names of parameters.
        self.left: dict[str, dict[str, Any]] = {}
        self.names = NameMap(asked.rename, asked.allow_missing)
        self.missing: Sequence[str] = ()  # parameters of all ranks that stay as they are

    def prepare(self, opened: ExitStack, index: bytes | None) -> None:
        """Open the files, which ``opened`` closes, and read all that does not go straight into the objects."""
        chosen, asked = self._chosen, self._asked
        if self.open_files is not None:
            self.files = self.open_files()
        elif is_plain_dcp(chosen.path):
            self.files = MatchedFiles(chosen.path, asked.state, asked.names, self.names)
        else:
            self.files = CheckpointFiles.of(chosen, asked.own, index)
        opened.enter_context(self.files)
        if not isinstance(self.files, MatchedFiles):
            self.files.rename_entries(self.names.rename_entries(self.files.index.state, asked.state))
        if asked.allow_missing:
            self.names.look(placing.names_here(asked.state, asked.names))
        sizes = chosen.manifest.world_size, asked.ranks.rank, asked.ranks.size
        given = asked.state, *sizes, asked.names, asked.cast, self.names
        self._found, self.left = placing.find(self.files, *given, str(asked.ranks.rank) in chosen.manifest.lost)
        if entries.rng_name(asked.ranks.rank) not in self._found:
            self._seeding = seeding.Seeding(chosen.manifest, asked.twins, asked.ranks.rank, asked.ranks.size)
            self._sources = {rank: entries.rng_name(rank) for rank in self._seeding.sources(self.files.index.state)}
            self._found |= {name: self.files.structure(name) for name in self._sources.values()}
        lacking = (asked.state.keys() - self._found.keys()).union(self.names.all_missing())
        if asked.touched and lacking:
            raise CheckpointError(f"it does not have {listed(sorted(lacking))}")
        self._read()

    def take_rests(self, found: MergedScan) -> None:
        """Take what is left of entries on all ranks as well, where an object may want it."""
        if found.unused:
            raise CheckpointError(self.names.no_such())
        for name, rest in self.left.items():
            more = {key: rest[key] for key in rest if key in found.rests[name]}
            placing.take_rest(self._asked.state, name, self._found[name], more)
        self._read()

    def _read(self) -> None:
        files, own = self.files, (self._asked.state, self._asked.names, self._asked.cast)
        leaves = [leaf for name, each in self._found.items() for leaf in placing.pair_live(each, name, *own)]
        modules, plain = placing.written(self._asked.state, self._found)
        placed = [leaf for leaf in leaves if leaf.in_place]
        sharing.read_apart(dict.fromkeys(itertools.chain(*modules.values(), plain, placed)))
        into = leaves if self._once else [leaf for leaf in leaves if leaf.in_place]
        self.transfer = files.plan(into)
        if not self._once:
            files.open_for(into)
            files.read([leaf for leaf in leaves if not leaf.in_place])
            if self._seeding is None:
                rng.expect_valid(fill(self._found[entries.rng_name(self._asked.ranks.rank)]))

    def assign(self) -> seeding.Seeded | None:
        """Have the objects take what was read, and read the rest into them; return the generators that it seeds."""
        saved_size, state, ranks = self._chosen.manifest.world_size, self._asked.state, self._asked.ranks
        rank = ranks.rank if saved_size == ranks.size else None
        own = [name for name in state if name not in self._found]
        new = [name for name in own if self.names.may_miss(name)]
        if (begun := [*new, *self.missing]) and ranks.rank == 0:
            _log.warning("%s has nothing for %s: begun from scratch.", self._chosen.path, listed(begun))
        for name in (each for each in state if each in self._found):
            placing.expect_forms(state, name, self._found[name])
        if ranks.rank == 0:
            placing.warn_of_not_filled(self._chosen.path, state, self._found, self._asked.cast)
        options = replaced.options_of(state) if ranks.rank == 0 else None
        merger = placing.merger(state, self._found)
        placing.add_beside(state, self._found)
        try:
            if not self._once:
                self.transfer.run()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(placing.changed_in_part(error)) from error
        changed = [name for name, each in self._found.items() if any(leaf.in_place for leaf in marks(each))]
        last = sharing.buffers_of_ranks(state)
        for name in sorted((each for each in state if each in self._found), key=last.__contains__):
            missing = self.names.missing.get(name, ())
            try:
                placing.assign(state, name, fill(self._found[name]), self._asked.names, merger, rank, missing)
            except Exception as error:
                raise CheckpointError(placing.refused_late(name, reason(error), changed)) from error
            changed += [name] if name not in changed else []
        replaced.warn_of_replaced(state, options)
        if self._seeding is None:
            try:
                rng.restore(fill(self._found[entries.rng_name(ranks.rank)]))
            except CheckpointError as error:  # of a checkpoint that is read once; else :meth:`_read` has found it
                raise CheckpointError(placing.changed_in_part(error)) from error
            return None
        saved = {each: fill(self._found[name]) for each, name in self._sources.items()}
        seeded = self._seeding.apply(state, self._found, saved)
        if rank is None and ranks.rank == 0:
            own = [name for name in own if name not in new and name not in seeded.anew]
            more = f"; {', '.join(own)} (each rank's own) stay as they are" if own else ""
            by = f"of {saved_size} rank{'s' * (saved_size > 1)}" if saved_size else "of plain torch"
            seed = "the checkpoint" if saved_size else "the seed of the program"
            text = "%s is %s: random numbers start anew, seeded from %s, the step and the rank%s."
            _log.warning(text, self._chosen.path, by, seed, more)
        return seeded
