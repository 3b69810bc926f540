"""Chooses a checkpoint to resume from, and loads it into the objects of a run.

Rank 0 lists the store, so that all ranks use the same list: complete checkpoints, newest first, and directories that
are none by their manifest or a size. ``"auto"`` passes over those that runs crash after (:mod:`.crashes`), too. Then
the content of the files is compared with the manifest. Each rank reads a share, of a disk of its machine among those of
the machine, else among all. A file that could not be looked at (no permission, a server that does not answer) is not
damage but an error: passing over it would give up steps that may be fine. Every rank also opens what it needs, and
reads what does not go straight into a live tensor.

The ranks agree once on all of that, and no object changes before. What is read into live tensors comes last, from files
that were checked; if the disk fails then, the error says that the objects have changed in part.

From an object store or a network file system each byte is read by one rank only (:mod:`.shared_read`) and checked on
the way, so objects may have changed in part when damage is found. The checkpoint before then overwrites all of that;
where there is none, the error says that the objects hold a mixture.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import stagereg.checkpoint.load.placing as placing
import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
import stagereg.record as record
from stagereg.checkpoint.format.damage import Condition, Found, Unclear, differences, marks_of_shares, share
from stagereg.checkpoint.format.encoding import fill
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import MANIFEST, Checkpoint
from stagereg.checkpoint.load.crashes import CrashCounter, Crashes, is_in_order
from stagereg.checkpoint.load.matching import MatchedFiles, describe
from stagereg.checkpoint.load.plain_dcp import is_plain_dcp
from stagereg.checkpoint.load.reading import CheckpointFiles, Transfer
from stagereg.checkpoint.load.shared_read import SharedRead, shared_index
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import is_url, open_parent_store
from stagereg.errors import CheckpointError, DamagedError, kind_of, reason
from stagereg.machine import is_on_network, machine_name

_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """The arguments of :func:`restore`, and the paths of checkpoints that have got into objects in part."""

    verify: str
    read: str
    cast: bool
    state: MutableMapping[str, Any]
    own: Storage
    ranks: RankGroup
    names: ParameterNames
    touched: list[str]
    counter: CrashCounter
    fresh: Sequence[str]


class _GivenUp(str):
    """What stands in the place of damage, of a checkpoint that runs crash after."""


def restore(
    store: CheckpointStore,
    resume: str,
    verify: str,
    read: str,
    cast: bool,
    state: MutableMapping[str, Any],
    own: Storage,
    ranks: RankGroup,
    names: ParameterNames,
    ready: Callable[[], object],
    counter: CrashCounter,
    fresh: Sequence[str],
) -> Checkpoint | None:
    """Load what ``resume`` stands for into the objects and values of ``state``. Collective.

    A checkpoint is read through the storage that wrote it: ``own``, the checkpointer's, if it is that one. One that is
    found to be damaged before the reading into live tensors begins has got into no object; ``"auto"`` then goes on to
    the one before, and logs that. With ``"once"`` that one overwrites what the damaged one has changed.

    Args:
        store: the directory of checkpoints.
        resume: ``"auto"``, ``"latest"`` or the path of a checkpoint.
        verify: ``"full"`` looks at the content of every file first, ``"fast"`` at manifest and sizes.
        read: ``"each"``, ``"once"`` or ``"auto"``, as :class:`.Checkpointer` has it.
        cast: whether what was saved is converted to the dtypes of the objects.
        state: as given to ``Checkpointer.restore``.
        own: the checkpointer's storage.
        ranks: who restores.
        names: of the parameters of ``state``.
        ready: called first; what it raises keeps all ranks from restoring.
        counter: of the crashes after checkpoints of this run's directory.
        fresh: the entries of ``state`` that stay as they are where nothing was saved for them.

    Returns:
        The checkpoint, or ``None`` if ``resume`` is ``"auto"`` and there is nothing to go on from.

    Raises:
        CheckpointError: on all ranks: what was asked for is not there or damaged; there are checkpoints, and
            ``"auto"`` found none of them good; some rank's objects do not take what was saved; reading failed after
            the check, and the objects have changed in part.
    """
    asked = _Asked(verify, read, cast, state, own, ranks, names, [], counter, fresh)
    try:
        return _tried(store, resume, ready, asked)
    except CheckpointError as error:
        if is_in_order(error):  # it was refused, and crashed nothing
            counter.leave()
        if not asked.touched:
            raise
        raise kind_of([error])(
            f"{str(error).rstrip()}\nThe objects hold a mixture of what they had and what was read of "
            f"{asked.touched[0]}, since read=once checks on the way: do not train with them; restore another "
            "checkpoint, or start anew."
        ) from error


def _tried(store: CheckpointStore, resume: str, ready: Callable[[], object], asked: _Asked) -> Checkpoint | None:
    """As :func:`restore`."""
    ranks, where = asked.ranks, resume if resume not in ("auto", "latest") else store.root

    def look() -> tuple[list[Condition], str, bool]:
        ready()
        listed = _choice(store, resume) if ranks.rank == 0 else []
        shared = is_url(where) or is_on_network(Path(where))
        return _without_given_up(store, resume, asked.counter, listed), machine_name(), shared

    def answer(seen: list[tuple[list[Condition], str, bool]]) -> list[tuple[list[Condition], _Machines]]:
        return [(seen[0][0], _machines(seen))] * ranks.size

    listed, machines = ranks.round_trip(f"Nothing was restored from {where}", look, answer, ranks.limit)
    if resume == "auto":
        _warn([each for each in listed if each.damages], ranks)
    passed: list[Condition] = []
    for condition in listed:
        candidate = condition.checkpoint
        if candidate is not None:
            parent = store if resume in ("auto", "latest") else open_parent_store(candidate.path)
            with parent.reading(candidate.path) if ranks.rank == 0 else nullcontext():
                asked.counter.begin(parent, candidate)
                condition = _restored(parent, candidate, machines, asked)
            if not condition.damages:
                _log_fallback(candidate, passed, ranks)
                return candidate
            parent.retention.distrusted.add(candidate.path)
            if resume == "auto":
                _warn([condition], ranks)
        passed.append(condition)
    if not passed:
        return None
    raise DamagedError(_nothing_good(store, passed) if resume == "auto" else _not_that_one(resume, passed[0]))


class _Machines(NamedTuple):
    """The ranks by who sees the same files, those of a machine or all; and whether all do."""

    ranks: list[list[int]]
    shared: bool


def _machines(seen: Sequence[tuple[object, str, bool]]) -> _Machines:
    if any(shared for *_, shared in seen):
        return _Machines([[*range(len(seen))]], True)
    by_name: dict[str, list[int]] = {}
    for rank, (_, name, _) in enumerate(seen):
        by_name.setdefault(name, []).append(rank)
    return _Machines([*by_name.values()], False)


# -- which checkpoint


def _choice(store: CheckpointStore, resume: str) -> list[Condition]:
    """Return what there is to go on from by manifests and sizes, in the order in which it is tried or reported.

    Raises:
        CheckpointError: there is none, or one could not be looked at.
    """
    if resume not in ("auto", "latest") and is_plain_dcp(resume):
        described = describe(resume)
        return [Condition(described.path, described.manifest)]
    if resume not in ("auto", "latest"):
        condition = open_parent_store(resume).look(resume)
        _expect_certain(condition)
        return [condition]
    complete, damaged = store.checkpoints()
    pointed = store.latest()
    found = [Condition(each.path, each.manifest) for each in complete]
    for each in damaged:
        _expect_certain(each)
        older = (at for at, other in enumerate(found) if _is_newer(each, other.checkpoint, pointed))
        found.insert(next(older, len(found)), each)
    if resume == "auto":
        return found
    if not found:
        raise CheckpointError(
            f"resume=latest, but there is no complete checkpoint in {store.root}; resume=auto starts from scratch."
        )
    return found[:1]


def _without_given_up(
    store: CheckpointStore, resume: str, counter: CrashCounter, listed: list[Condition]
) -> list[Condition]:
    """Return what was listed, with what ``"auto"`` does not try for crashes as if it were damaged; warn of others."""
    crashes = counter.of(store if resume in ("auto", "latest") else open_parent_store(resume)) if listed else {}
    for number, each in enumerate(listed):
        known = crashes.get(each.path, Crashes())
        if known.given_up and resume == "auto":
            what = f"{known.times} times, and each time the run died before its next checkpoint"
            listed[number] = Condition(each.path, each.manifest, {**each.damages, "restored": _GivenUp(what)})
        elif known.given_up:
            _log.warning("%s is restored since it was asked for, although it is %s.", each.path, known)
    return listed


def _is_newer(damaged: Condition, than: Checkpoint | None, latest: Checkpoint | None) -> bool:
    """Whether it was committed after a complete checkpoint, as far as is known."""
    if than is None or (latest is not None and than.manifest == latest.manifest):
        return False
    if damaged.manifest is not None:
        return damaged.manifest.order > than.manifest.order
    return damaged.step is None or damaged.step > than.manifest.step


def _expect_certain(condition: Condition) -> None:
    if any(isinstance(what, Unclear) for what in condition.damages.values()):
        raise CheckpointError(
            f"{condition.path} may be a good checkpoint, and it could not be looked at: {condition}. "
            "To go on from another one, name it: checkpoint.resume=PATH."
        )


# -- reading it


class _Looked(NamedTuple):
    """What a rank sends: what it found of its share of the files, whether it can load, and what is left of entries."""

    marks: dict[str, Found]
    can_load: bool = True
    left: Mapping[str, Sequence[str]] = {}


class _Found(NamedTuple):
    """What all ranks have found: what is wrong with the files, whether one cannot load, and what none of them takes."""

    unclear: list[str]
    missed: list[tuple[int, str]]
    wrong: dict[str, str]
    failed: bool
    rests: dict[str, set[str]]


def _restored(store: CheckpointStore, chosen: Checkpoint, machines: _Machines, asked: _Asked) -> Condition:
    """Restore a checkpoint, or return what is wrong with its files. Collective.

    Nothing has changed then, unless its path is in ``touched``.

    Raises:
        CheckpointError: on all ranks, if some rank cannot read it although its files are what was written.
    """
    ranks, failing = asked.ranks, f"{chosen.path} could not be restored"
    passed_on = asked.read == "once" or (asked.read == "auto" and machines.shared and ranks.size > 1)
    once = passed_on and INDEX in chosen.manifest.files
    checks = asked.verify == "full" and not once
    loading = _Loading(chosen, asked, once)
    failure: Exception | None = None

    def exchange(look: Callable[[], _Looked]) -> tuple[_Found, Condition]:
        def answer(looked: list[_Looked]) -> list[_Found]:
            return [_together(chosen, machines, looked)] * ranks.size

        found = ranks.round_trip(failing, look, answer, ranks.limit)
        return found, _condition(store, chosen, ranks, found)

    def check() -> _Looked:
        [own] = [machine for machine in machines.ranks if ranks.rank in machine]
        return _Looked(store.contents(chosen.path, share(chosen.manifest.files, own.index(ranks.rank), len(own))))

    def prepare() -> _Looked:
        nonlocal failure
        looked = check() if checks else _Looked({})
        try:
            if failure is None:
                loading.prepare(opened, index)
        except Exception as error:
            failure = error
        return looked._replace(can_load=failure is None, left={name: [*rest] for name, rest in loading.left.items()})

    with ExitStack() as opened:
        try:
            index = shared_index(chosen, ranks) if once else None
        except CheckpointError as error:  # on all ranks
            failure = error
        found, condition = exchange(prepare)
        if checks and condition.damages:
            return condition
        failed = found.failed
        if any(found.rests.values()) and not failed:
            try:
                loading.keep(found.rests)
            except Exception as error:
                failure = error
            failed = any(ranks.run_on_all(failing, lambda: failure is not None))
        if once and not failed:
            try:
                shared_read = SharedRead(chosen, loading.files, loading.transfer, ranks, asked.verify == "full")
                asked.touched.append(chosen.path)
                if damages := shared_read.run():
                    return Condition(chosen.path, chosen.manifest, damages)
            except CheckpointError as error:  # on all ranks
                failed, failure = True, error
        if failed:
            _, condition = exchange(check)
            if condition.damages:
                return condition
            ranks.run_on_all(failing, partial(_raise, failure))
        ranks.run_on_all(failing, loading.assign)
    return Condition(chosen.path, chosen.manifest)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _together(chosen: Checkpoint, machines: _Machines, looked: Sequence[_Looked]) -> _Found:
    """Put together what the ranks have sent; on rank 0."""
    marks = [(rank, name, mark) for rank, each in enumerate(looked) for name, mark in each.marks.items()]
    unclear = [f"rank {rank}: {name}: {mark}" for rank, name, mark in marks if isinstance(mark, Unclear)]
    missed = [(rank, name) for rank, name, mark in marks if mark == "missing"]
    wrong: dict[str, str] = {}
    for machine in machines.ranks if marks else ():
        wrong |= differences(chosen.manifest, marks_of_shares([looked[rank].marks for rank in machine]))
    left = [each.left for each in looked]
    rests = {name: set.intersection(*(set(each[name]) for each in left if name in each)) for name in set().union(*left)}
    return _Found(unclear, missed, wrong, not all(each.can_load for each in looked), rests)


def _condition(store: CheckpointStore, chosen: Checkpoint, ranks: RankGroup, found: _Found) -> Condition:
    """Return what is wrong with a checkpoint, of which each rank has read a share. Collective.

    Raises:
        CheckpointError: on all ranks: a file could not be looked at, or not by every rank.
    """
    failing = f"{chosen.path} could not be read"
    if found.unclear:
        raise CheckpointError(f"{failing}: {'; '.join(found.unclear[:3])}")
    if found.missed:  # a file that another rank sees is not lost: the ranks see different file systems
        complete = ranks.run_on_all(failing, lambda: not store.look(chosen.path).damages)
        if any(complete):
            rank, name = found.missed[0]
            raise CheckpointError(
                f"Rank {rank} does not find {chosen.path}/{name}, which rank {complete.index(True)} does: all ranks "
                f"have to see the same files in {store.root}."
            )
    return Condition(chosen.path, chosen.manifest, found.wrong)


class _Loading:
    """What this rank takes of a checkpoint.

    Attributes:
        files: of the checkpoint, from :meth:`prepare` on.
        left: by entry what this rank does not take of it, by the names of parameters.
        transfer: what goes straight into the objects, with ``once`` all; with that it is read before :meth:`assign`.
    """

    files: CheckpointFiles
    transfer: Transfer

    def __init__(self, chosen: Checkpoint, asked: _Asked, once: bool) -> None:
        self._chosen, self._asked, self._once = chosen, asked, once
        self._found: dict[str, Any] = {}
        self.left: dict[str, dict[str, Any]] = {}

    def prepare(self, opened: ExitStack, index: bytes | None) -> None:
        """Open the files, which ``opened`` closes, and read all that does not go straight into the objects."""
        chosen, (_, _, cast, state, own, ranks, names, touched, _, fresh) = self._chosen, self._asked
        plain = is_plain_dcp(chosen.path)
        self.files = MatchedFiles(chosen.path, state, names, fresh) if plain else CheckpointFiles.of(chosen, own, index)
        opened.enter_context(self.files)
        world_size = chosen.manifest.world_size
        self._found, self.left = placing.find(self.files, state, world_size, ranks.rank, ranks.size, names, cast, fresh)
        if touched and state.keys() - self._found.keys():
            raise CheckpointError(f"it does not have {', '.join(sorted(state.keys() - self._found.keys()))}")
        self._read()

    def keep(self, rests: Mapping[str, set[str]]) -> None:
        """Take what is left of entries on all ranks as well, where an object may want it."""
        for name, rest in self.left.items():
            more = {key: rest[key] for key in rest if key in rests[name]}
            placing.take_rest(self._asked.state, name, self._found[name], more)
        self._read()

    def _read(self) -> None:
        files, own = self.files, (self._asked.state, self._asked.names, self._asked.cast)
        leaves = [leaf for name, each in self._found.items() for leaf in placing.pair(each, name, *own)]
        into = leaves if self._once else [leaf for leaf in leaves if leaf.in_place]
        self.transfer = files.plan(into)
        if not self._once:
            files.open(into)
            files.read([leaf for leaf in leaves if not leaf.in_place])

    def assign(self) -> None:
        """Have the objects take what was read, and read the rest straight into them."""
        saved_size, (_, _, _, state, _, ranks, names, *_) = self._chosen.manifest.world_size, self._asked
        rank = ranks.rank if saved_size == ranks.size else None
        own = [name for name in state if name not in self._found]
        if (fresh := [name for name in own if name in self._asked.fresh]) and ranks.rank == 0:
            _log.warning("%s has nothing for %s: begun from scratch.", self._chosen.path, ", ".join(fresh))
        try:
            if not self._once:
                self.transfer.run()
        except OSError as error:
            raise CheckpointError(f"the objects have changed in part: {error}") from error
        for name in (each for each in state if each in self._found):
            try:
                placing.assign(state, name, fill(self._found[name]), names, rank)
            except Exception as error:
                raise CheckpointError(placing.refusal(name, reason(error))) from error
        if rank is not None:
            rng.restore(fill(self._found[entries.rng_name(ranks.rank)]))
        elif ranks.rank == 0:
            own = [name for name in own if name not in fresh]
            more = f", and {', '.join(own)} (each rank's own) stay as they are" if own else ""
            by = f"of {saved_size} rank{'s' * (saved_size > 1)}" if saved_size else "of plain torch"
            _log.warning("%s is %s: random numbers start anew%s.", self._chosen.path, by, more)


# -- messages


def _warn(damaged: Sequence[Condition], ranks: RankGroup) -> None:
    for each in damaged if ranks.rank == 0 else ():
        _log.warning("%s is %s and passed over:\n%s%s", each.path, _word(each), _indented(each), _how_to_try(each))


def _log_fallback(chosen: Checkpoint, passed: Sequence[Condition], ranks: RankGroup) -> None:
    """Log what is lost by resuming from ``chosen`` although others are newer."""
    if not passed or ranks.rank != 0:
        return
    step = chosen.manifest.step
    newest = max(passed, key=lambda each: -1 if each.step is None else each.step)
    lost = max(0, (newest.step or 0) - step)
    text = f"{_word(newest)}{f': {lost} step' + ('s are' if lost > 1 else ' is') + ' lost' if lost else ''}"
    _log.warning("Resumed from step %d, NOT from step %s, which is %s.", step, newest.step, text)
    record.emit("fallback", step=step, damaged=newest.step, lost=lost, why=str(newest))


def _nothing_good(store: CheckpointStore, damaged: Sequence[Condition]) -> str:
    every = "\n".join(f"  {each.name}: {each}" for each in damaged)
    more = next(filter(None, map(_how_to_try, damaged)), "").strip()
    more = f"{more}\n" if more else ""
    return (
        f"There are checkpoints in {store.root}, and none of them is good:\n{every}\n{more}"
        "Starting from scratch would give the run up, so no step was taken. Put back what is missing, or start from "
        f"scratch with checkpoint.resume=never. `stagereg verify {shlex.quote(store.root)}` shows them again."
    )


def _not_that_one(resume: str, damaged: Condition) -> str:
    what = f"it is damaged:\n{_indented(damaged)}\n"
    if damaged.manifest is None and set(damaged.damages.values()) == {"missing"}:
        there = is_url(damaged.path) or os.path.exists(damaged.path)
        what = f"there is no {MANIFEST} in it. " if there else "it is not there. "
    named = resume if resume == damaged.path else f"{resume}: {damaged.path}"
    beside = shlex.quote(open_parent_store(damaged.path).root)
    return f"resume={named} is not a complete checkpoint: {what}`stagereg verify {beside}` shows which are good."


def _word(condition: Condition) -> str:
    return "given up" if any(isinstance(what, _GivenUp) for what in condition.damages.values()) else "damaged"


def _how_to_try(condition: Condition) -> str:
    ways = "checkpoint.resume=PATH or checkpoint.restore.give_up_after=null"
    more = f"\n  If that had another cause, go on from it with {ways}."
    return more if _word(condition) == "given up" else ""


def _indented(condition: Condition) -> str:
    return "\n".join(f"  {line}" for line in condition.lines())
