"""Chooses a checkpoint to resume from, and loads it into the objects of a run.

Rank 0 lists the candidates: the checkpoints from all sources, such as the checkpoint directory. The ranks restore the
first candidate that has no rejection and no corrupt file. Ranks that see the same files divide the files among them,
and compare the content with the manifest. A file that cannot be accessed is an error, not corruption. Meanwhile, every
rank reads the entries that are not read directly into live tensors. No object changes before all ranks can load.

From an object store or a network file system, each byte is read and checked by one rank (:class:`.SharedReader`). Some
objects may already have changed when this rank finds corruption. The next candidate then overwrites all changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import stagereg.checkpoint.load.choosing as choosing
import stagereg.checkpoint.load.seeding as seeding
from stagereg.base.machine import machine_name
from stagereg.base.providers import providers
from stagereg.checkpoint.extension import Candidate, CheckpointSource, RestoreExtension, RestoreRequest, SharedReader
from stagereg.checkpoint.format.damage import Found, InaccessibleFile, differences, marks_of_shares
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.load.loading import Loading
from stagereg.checkpoint.load.placing import DO_NOT_TRAIN
from stagereg.checkpoint.load.store_source import StoreSource
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.errors import CheckpointError, CorruptCheckpointError, kind_of, name_ranks
from stagereg.stagers.guard import announce_write


def restore(asked: RestoreRequest, own: Sequence[RestoreExtension], ready: Callable[[], object]) -> Checkpoint | None:
    """Load the checkpoint that ``asked.resume`` names into the objects and values of ``asked.state``. Collective.

    With ``"auto"`` a corrupt checkpoint is skipped with a warning before any object changes. With ``read="once"``
    objects may have changed, and the next candidate overwrites all values from the corrupt checkpoint.

    ``own``: the extensions of the checkpointer; installed extensions without options are called before these. ``ready``
    is called first, on each rank. If the call raises an exception on one rank, no rank restores. The result is ``None``
    if ``asked.resume`` is ``"auto"`` and there is no checkpoint.

    Raises:
        CheckpointError: on all ranks. The checkpoint is missing or corrupt; ``"auto"`` found only invalid checkpoints;
            an object on some rank rejects its state; or reading failed after some objects had changed.
    """
    announce_write()  # the copy of an unfinished save may still read the memory that the restore overwrites
    run = _Restore(asked, [*installed(), *own])
    try:
        return run.restore(ready)
    except CheckpointError as error:
        for each in run.extensions:
            each.refused(error)
        if not run.touched:
            raise
        raise kind_of([error])(
            f"{str(error).rstrip()}\nThe objects now mix their own values with values that were read from "
            f"{run.touched[0]}, because read=once checks while reading. {DO_NOT_TRAIN}."
        ) from error


def installed() -> Iterator[RestoreExtension]:
    """Yield an instance of each restore extension in the list ``EXTENSIONS`` of an installed ``restoring`` module."""
    for module in providers("restoring"):
        yield from (extension() for extension in module.EXTENSIONS)


class _Report(NamedTuple):
    """What one rank sends to rank 0 before the restore."""

    listed: list[Candidate]  # empty except on rank 0
    machine: str
    shared: bool  # whether all machines see the same files, according to this rank
    seeds: Mapping[str, str]  # the seeds of the RNGs, by name


class _Agreed(NamedTuple):
    """Data that rank 0 sends to all ranks after it has listed the candidates."""

    listed: list[Candidate]  # in the order of the attempts
    machines: list[list[int]]  # groups of ranks that see the same files
    shared: bool  # whether all ranks see the same files
    twins: Mapping[str, list[int]]  # the result of :func:`.lowest_twins`


class _ScanResult(NamedTuple):
    """The results that one rank sends to rank 0."""

    marks: dict[str, Found]  # digest or error of each file that this rank has checked
    can_load: bool = True
    left: Mapping[str, Sequence[str]] = {}  # saved parameters that this rank does not load, by entry
    missing: Sequence[str] = ()  # parameters without saved values that ``allow_missing`` permits
    unused: Sequence[str] = ()  # names in ``allow_missing`` that match no name on this rank
    corrupt: str = ""  # the error if no copy of the data that this rank can read is valid


class _MergedScan(NamedTuple):
    """The merged results of all ranks. Rank 0 sends them to every rank."""

    unclear: list[str]  # error messages for files that a rank could not access
    missed: list[tuple[int, str]]  # ranks and the files that they did not find
    wrong: dict[str, str]  # corrupt files with the error
    failed: bool  # whether at least one rank cannot load
    rests: dict[str, set[str]]  # saved parameters that no rank loads, by entry
    missing: list[str]  # like _ScanResult.missing, on any rank
    unused: list[str]  # like _ScanResult.unused, on all ranks


class _Restore:
    """One restore on all ranks. ``touched``: the corrupt checkpoints that may have been loaded into some objects."""

    def __init__(self, asked: RestoreRequest, extensions: Sequence[RestoreExtension]) -> None:
        self.asked, self.extensions = asked, extensions
        self.touched: list[str] = []

    def restore(self, ready: Callable[[], object]) -> Checkpoint | None:
        """Try the candidates in order until one is restored, and return its checkpoint. Collective."""
        asked, ranks, skips = self.asked, self.asked.ranks, self.asked.resume == "auto"
        sources = self._sources()
        agreed = self._agree(sources, ready)
        listed = agreed.listed
        for extension in self.extensions:
            listed = extension.candidates(asked, listed)
        if skips:
            choosing.warn_of_skipped([each for each in listed if each.checkpoint is None], ranks)
        passed: list[Candidate] = []
        for candidate in listed:
            if candidate.checkpoint is not None:
                source = next(each for each in sources if each.name == candidate.source)
                with source.lease(candidate) if ranks.rank == 0 else nullcontext():
                    ranks.run_on_all(asked.failing, partial(self._announce, candidate))
                    damages = _Attempt(self, candidate.checkpoint, candidate, source, agreed).run()
                if not damages:
                    choosing.log_fallback(candidate.checkpoint, passed, ranks)
                    return self._end(candidate)
                source.corrupt(candidate)
                candidate = replace(candidate, found=replace(candidate.found, damages=damages))
                if skips:
                    choosing.warn_of_skipped([candidate], ranks)
            passed.append(candidate)
        if not passed:
            return self._end(None)
        root = next((each.root for each in sources if each.root), asked.store.root)
        raise choosing.nothing_good(root, passed) if skips else choosing.not_that_one(asked.resume, passed[0])

    def _sources(self) -> list[CheckpointSource]:
        """Return all sources of candidates, or only the source that can read the path in ``resume``."""
        every = [StoreSource(self.asked), *(each for one in self.extensions for each in one.sources(self.asked))]
        return [each for each in every if self.asked.is_path and each.claims(self.asked.resume)] or every

    def _agree(self, sources: Sequence[CheckpointSource], ready: Callable[[], object]) -> _Agreed:
        """List the candidates on rank 0, and group the ranks that see the same files. Collective."""
        asked = self.asked
        some = [each.survey() for each in sources]
        resume = "auto" if any(some) and asked.resume == "latest" else asked.resume

        def report() -> _Report:
            ready()
            listed: list[Candidate] = []
            for source in sources if asked.ranks.rank == 0 else ():
                listed = source.insert(listed, resume)
            return _Report(listed, machine_name(), backend_of(asked.where).shared, seeding.seeds_of(asked.state))

        def answer(reports: list[_Report]) -> list[_Agreed]:
            listed = reports[0].listed
            if not listed and asked.resume != "auto":
                raise choosing.nothing_listed(asked)
            listed = listed[:1] if asked.resume == "latest" else listed
            listed = choosing.without_inexact(listed, asked.resume) if asked.exact else listed
            twins = seeding.lowest_twins([each.seeds for each in reports])
            shared = any(each.shared for each in reports)
            machines: dict[str, list[int]] = {}
            for rank, each in enumerate(reports):
                machines.setdefault("" if shared else each.machine, []).append(rank)
            return [_Agreed(listed, [*machines.values()], shared, twins)] * asked.ranks.size

        return asked.ranks.round_trip(asked.failing, report, answer, asked.ranks.limit)

    def _announce(self, candidate: Candidate) -> None:
        for each in self.extensions:
            each.restoring(self.asked, candidate)

    def _end(self, candidate: Candidate | None) -> Checkpoint | None:
        for each in self.extensions:
            each.restored(self.asked, candidate)
        return None if candidate is None else candidate.checkpoint


class _Attempt:
    def __init__(
        self, run: _Restore, chosen: Checkpoint, candidate: Candidate, source: CheckpointSource, agreed: _Agreed
    ) -> None:
        self._run, self._chosen, self._candidate, self._source = run, chosen, candidate, source
        self._machines, self._asked, self._ranks = agreed.machines, run.asked, run.asked.ranks
        self._shared = self._shared_reader(agreed.shared)
        # A shared reader checks each byte while it reads, so a separate check of the files is not necessary.
        self._checks = self._asked.verify == "full" and self._shared is None
        self._failing = f"{chosen.path} could not be restored"
        self._loading = Loading(chosen, self._asked, self._shared is not None, agreed.twins, bool(run.touched))
        self._failure: Exception | None = None  # this rank's error; raised unless a corrupt file explains it

    def _shared_reader(self, shared: bool) -> SharedReader | None:
        read = self._asked.read
        wanted = read == "once" or (read == "auto" and shared and self._ranks.size > 1)
        if not wanted or not self._source.shares_reads or INDEX not in self._chosen.manifest.files:
            return None
        return next((each.shared_reader for each in self._run.extensions if each.shared_reader is not None), None)

    def run(self) -> Mapping[str, str]:
        """Restore the candidate. If it is corrupt, return its corrupt files instead. Collective."""
        with ExitStack() as opened:
            found = self._exchange(partial(self._prepare, opened, self._shared_index()))
            if self._checks and found.wrong:
                return found.wrong
            failed = found.failed or self._take_rests(found)
            if self._shared is not None and not failed:
                if damages := self._read_once(self._shared):
                    return damages
                failed = self._failure is not None
            if failed:
                # If a corrupt file explains the failure, the candidate is skipped instead of raising the error.
                if damages := self._exchange(self._check).wrong:
                    return damages
                self._ranks.run_on_all(self._failing, partial(_raise, self._failure))
            seeded = self._ranks.run_on_all(self._failing, self._loading.assign)
            if self._ranks.rank == 0:
                choosing.warn_of_inexact(self._chosen, seeded, self._asked.state)
            self._source.restored(self._candidate, self._loading.files)
        return {}

    def _exchange(self, look: Callable[[], _ScanResult]) -> _MergedScan:
        """Call ``look`` on each rank, and return the merged results. Collective."""
        merge = partial(_merge, self._chosen, self._machines)
        found = self._ranks.round_trip(self._failing, look, merge, self._ranks.limit)
        failing = f"{self._chosen.path} could not be read"
        if found.unclear:
            raise CheckpointError(f"{failing}: {'; '.join(found.unclear[:3])}")
        if found.missed:  # another rank sees the file, so the ranks see different file systems
            complete = self._ranks.run_on_all(failing, lambda: self._source.is_complete(self._candidate))
            if any(complete):
                rank, name = found.missed[0]
                raise CheckpointError(
                    f"{self._chosen.path}/{name} exists on {self._ranks.name(complete.index(True))}, but not on "
                    f"{self._ranks.name(rank)}. All ranks must see the same files in "
                    f"{self._chosen.path.rpartition('/')[0]}."
                )
        return found

    def _digests(self) -> dict[str, Found]:
        """Check this rank's portion of the files. Ranks that see the same files divide the files among them."""
        [own] = [machine for machine in self._machines if self._ranks.rank in machine]
        return self._source.check(self._candidate, own.index(self._ranks.rank), len(own))

    def _check(self) -> _ScanResult:
        corrupt = str(self._failure) if isinstance(self._failure, CorruptCheckpointError) else ""
        return _ScanResult(self._digests(), corrupt=corrupt)

    def _prepare(self, opened: ExitStack, index: bytes | None) -> _ScanResult:
        """Check the files on another thread, while this thread reads into new memory, which no object uses yet."""
        with ThreadPoolExecutor(1, thread_name_prefix="stagereg-check") as checking:
            digests = checking.submit(self._digests) if self._checks else None
            try:
                if self._failure is None:
                    self._loading.prepare(opened.enter_context(self._source.files(self._candidate, index)))
            except Exception as error:
                self._failure = self._loading.names.explain(error)
            found = {} if digests is None else digests.result()
        loading = self._loading
        left = {name: [*rest] for name, rest in loading.left.items()}
        missing, unused = loading.names.all_missing(), loading.names.unused
        return _ScanResult(found, self._failure is None, left, missing, unused)

    def _shared_index(self) -> bytes | None:
        try:
            return None if self._shared is None else self._shared.index(self._chosen, self._ranks)
        except CheckpointError as error:  # on all ranks
            self._failure = error
            return None

    def _take_rests(self, found: _MergedScan) -> bool:
        """Pass saved values that no rank requested to objects. Return whether a rank failed. Collective."""
        self._loading.missing = found.missing
        if not any(found.rests.values()) and not found.unused:
            return False
        try:
            self._loading.take_rests(found.rests, found.unused)
        except Exception as error:
            self._failure = error
        return any(self._ranks.run_on_all(self._failing, lambda: self._failure is not None))

    def _read_once(self, reader: SharedReader) -> Mapping[str, str]:
        """Restore with ``reader``, so that only one rank reads and checks each byte. Return the corrupt files."""
        loading, full = self._loading, self._asked.verify == "full"
        try:
            read = reader.begin(self._chosen, loading.files, loading.transfer, self._ranks, full)
            self._run.touched.append(self._chosen.path)
            return read()
        except CheckpointError as error:  # on all ranks
            self._failure = error
            return {}


def _merge(chosen: Checkpoint, machines: Sequence[Sequence[int]], looked: list[_ScanResult]) -> list[_MergedScan]:
    """Merge the results of all ranks, ``looked``, and return the merged results for each rank. Called on rank 0."""
    marks = [(rank, name, mark) for rank, each in enumerate(looked) for name, mark in each.marks.items()]
    unclear = [f"{name_ranks([of])}: {name}: {mark}" for of, name, mark in marks if isinstance(mark, InaccessibleFile)]
    missed = [(rank, name) for rank, name, mark in marks if mark == "missing"]
    wrong: dict[str, str] = {}
    for machine in machines if marks else ():
        wrong |= differences(chosen.manifest, marks_of_shares([looked[rank].marks for rank in machine]))
    wrong |= {name_ranks([rank]): each.corrupt for rank, each in enumerate(looked) if each.corrupt}
    left = [each.left for each in looked]
    rests = {name: set.intersection(*(set(each[name]) for each in left if name in each)) for name in set().union(*left)}
    missing = [*dict.fromkeys(name for each in looked for name in each.missing)]
    unused = [name for name in looked[0].unused if all(name in each.unused for each in looked)]
    failed = not all(each.can_load for each in looked)
    return [_MergedScan(unclear, missed, wrong, failed, rests, missing, unused)] * len(looked)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
