"""Chooses a checkpoint to resume from, and loads it into the objects of a run.

Rank 0 lists the store, so that all ranks use the same list: complete checkpoints, newest first, and directories that
are none by their manifest or a size. Then the content of the files is compared with the manifest. Each rank reads a
share, of a disk of its machine among those of the machine, else among all. A file that could not be looked at (no
permission, a server that does not answer) is not damage but an error: passing over it would give up steps that may be
fine.

After that every rank opens what it needs, and reads what does not go straight into a live tensor. The ranks agree after
each part, and no object changes before all of them have come that far. What is read into live tensors comes last, from
files that were checked; if the disk fails then, the error says that an object has changed in part.

From an object store or a network file system each byte is read by one rank only (:mod:`.shared_read`) and checked on
the way, so objects may have changed in part when damage is found. The checkpoint before then overwrites all of that;
where there is none, the error says that the objects hold a mixture.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import stagereg.checkpoint.entries as entries
import stagereg.checkpoint.rng as rng
import stagereg.record as record
from stagereg.checkpoint.damage import Condition, Unclear, differences
from stagereg.checkpoint.encoding import fill
from stagereg.checkpoint.file_shares import marks_of_shares, share
from stagereg.checkpoint.index import INDEX
from stagereg.checkpoint.manifest import MANIFEST, Checkpoint
from stagereg.checkpoint.matching import MatchedFiles, describe
from stagereg.checkpoint.optimizer_state import ParameterNames
from stagereg.checkpoint.plain_dcp import is_plain_dcp
from stagereg.checkpoint.rank_group import RankGroup, reason
from stagereg.checkpoint.reading import CheckpointFiles, Transfer
from stagereg.checkpoint.shared_read import SharedRead, shared_index
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.mounts import is_shared, machine_name
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import CheckpointError

__all__ = ["restore"]

_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """The arguments of :func:`restore`, and the paths of checkpoints that have got into objects in part."""

    verify: str
    read: str
    state: MutableMapping[str, Any]
    own: Storage
    ranks: RankGroup
    names: ParameterNames
    touched: list[str]


def restore(
    store: CheckpointStore,
    resume: str,
    verify: str,
    read: str,
    state: MutableMapping[str, Any],
    own: Storage,
    ranks: RankGroup,
    names: ParameterNames,
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
        state: as given to ``Checkpointer.restore``.
        own: the checkpointer's storage.
        ranks: who restores.
        names: of the parameters of ``state``.

    Returns:
        The checkpoint, or ``None`` if ``resume`` is ``"auto"`` and there is nothing to go on from.

    Raises:
        CheckpointError: on all ranks: what was asked for is not there or damaged; there are checkpoints, and
            ``"auto"`` found none of them good; some rank's objects do not take what was saved; reading failed after
            the check, and an object has changed in part.
    """
    asked = _Asked(verify, read, state, own, ranks, names, touched=[])
    try:
        return _tried(store, resume, asked)
    except CheckpointError as error:
        if not asked.touched:
            raise
        raise CheckpointError(
            f"{str(error).rstrip()}\nThe objects hold a mixture of what they had and what was read of "
            f"{asked.touched[0]}, since read=once checks on the way: do not train with them; restore another "
            "checkpoint, or start anew."
        ) from error


def _tried(store: CheckpointStore, resume: str, asked: _Asked) -> Checkpoint | None:
    """As :func:`restore`."""
    ranks = asked.ranks
    failing = f"Nothing was restored from {store.root}"
    listed = ranks.run_on_all(failing, lambda: _choice(store, resume) if ranks.rank == 0 else [])[0]
    if resume == "auto":
        _warn([each for each in listed if each.damages], ranks)
    passed: list[Condition] = []
    for condition in listed:
        candidate = condition.checkpoint
        if candidate is not None:
            where = store if resume in ("auto", "latest") else open_parent_store(candidate.path)
            condition = _restored(where, candidate, asked)
            if not condition.damages:
                _log_fallback(candidate, passed, ranks)
                return candidate
            where.distrusted.add(candidate.path)
            if resume == "auto":
                _warn([condition], ranks)
        passed.append(condition)
    if not passed:
        return None
    raise CheckpointError(_nothing_good(store, passed) if resume == "auto" else _not_that_one(resume, passed[0]))


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
        condition = open_parent_store(resume).condition(resume)
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


def _is_newer(damaged: Condition, than: Checkpoint | None, latest: Checkpoint | None) -> bool:
    """Whether it was committed after a complete checkpoint, as far as is known."""
    if than is None or (latest is not None and than.manifest == latest.manifest):
        return False
    if damaged.manifest is not None:
        return (damaged.manifest.serial, damaged.manifest.step) > (than.manifest.serial, than.manifest.step)
    return damaged.step is None or damaged.step > than.manifest.step


def _expect_certain(condition: Condition) -> None:
    if any(isinstance(what, Unclear) for what in condition.damages.values()):
        raise CheckpointError(
            f"{condition.path} may be a good checkpoint, and it could not be looked at: {condition}. "
            "To go on from another one, name it: checkpoint.resume=PATH."
        )


def _machines(path: str, ranks: RankGroup) -> tuple[list[list[int]], bool]:
    """Return the ranks by who sees the same files, those of a machine or all, and whether it is all. Collective."""
    failing = f"{path} could not be read"
    seen = ranks.run_on_all(failing, lambda: (machine_name(), is_shared(path)))
    if any(shared for _, shared in seen):
        return [[*range(ranks.size)]], True
    by_name: dict[str, list[int]] = {}
    for rank, (name, _) in enumerate(seen):
        by_name.setdefault(name, []).append(rank)
    return [*by_name.values()], False


def _compared(
    store: CheckpointStore, chosen: Checkpoint, ranks: RankGroup, machines: Sequence[Sequence[int]]
) -> Condition:
    """Read all files of a checkpoint, each rank of a machine a share, and return what is wrong. Collective.

    Raises:
        CheckpointError: on all ranks: a file could not be looked at, or not by every rank.
    """
    [own] = [machine for machine in machines if ranks.rank in machine]
    part = share(chosen.manifest.files, own.index(ranks.rank), len(own))
    failing = f"{chosen.path} could not be read"
    shares = ranks.run_on_all(failing, lambda: store.contents(chosen.path, part))
    marks = [(rank, name, mark) for rank, found in enumerate(shares) for name, mark in found.items()]
    unclear = [f"rank {rank}: {name}: {mark}" for rank, name, mark in marks if isinstance(mark, Unclear)]
    if unclear:
        raise CheckpointError(f"{failing}: {'; '.join(unclear[:3])}")
    missed = [(rank, name) for rank, name, mark in marks if mark == "missing"]
    if missed:  # a file that another rank sees is not lost: the ranks see different file systems
        complete = ranks.run_on_all(failing, lambda: not store.condition(chosen.path).damages)
        if any(complete):
            rank, name = missed[0]
            raise CheckpointError(
                f"Rank {rank} does not find {chosen.path}/{name}, which rank {complete.index(True)} does: all ranks "
                f"have to see the same files in {store.root}."
            )
    wrong: dict[str, str] = {}
    for machine in machines:
        wrong |= differences(chosen.manifest, marks_of_shares([shares[rank] for rank in machine]))
    return Condition(chosen.path, chosen.manifest, wrong)


# -- reading it


def _restored(store: CheckpointStore, chosen: Checkpoint, asked: _Asked) -> Condition:
    """Restore a checkpoint, or return what is wrong with its files. Collective.

    Nothing has changed then, unless its path is in ``touched``.

    Raises:
        CheckpointError: on all ranks, if some rank cannot read it although its files are what was written.
    """
    verify, read, state, own, ranks, names, touched = asked
    good = Condition(chosen.path, chosen.manifest)
    machines, shared = _machines(chosen.path, ranks)
    once = INDEX in chosen.manifest.files and (read == "once" or (read == "auto" and shared and ranks.size > 1))
    condition = _compared(store, chosen, ranks, machines) if verify == "full" and not once else good
    if condition.damages:
        return condition
    failing, failure = f"{chosen.path} could not be restored", None
    with ExitStack() as opened:
        try:
            index = shared_index(chosen, ranks) if once else None
            plain = is_plain_dcp(chosen.path)
            files = MatchedFiles(chosen.path, state, names) if plain else CheckpointFiles.of(chosen, own, index)
            opened.enter_context(files)
            found, left = entries.find(files, state, chosen.manifest.world_size, ranks.rank, ranks.size, names)
        except Exception as error:
            failure, left = error, {}
        every = ranks.run_on_all(failing, lambda: (failure is None, {name: [*rest] for name, rest in left.items()}))
        if all(fine for fine, _ in every):
            try:
                for name, rest in left.items():
                    common = set(rest).intersection(*(of_rank[name] for _, of_rank in every if name in of_rank))
                    entries.keep(state, name, found[name], {key: rest[key] for key in rest if key in common})
                if touched and state.keys() - found.keys():
                    raise CheckpointError(f"it does not have {', '.join(sorted(state.keys() - found.keys()))}")
                transfer, assign = _load(chosen, state, found, files, ranks, names, once)
            except Exception as error:
                failure = error
        failed = any(ranks.run_on_all(failing, lambda: failure is not None))
        if once and not failed:
            try:
                shared_read = SharedRead(chosen, files, transfer, ranks, verify == "full")
                touched.append(chosen.path)
                if damages := shared_read.run():
                    return Condition(chosen.path, chosen.manifest, damages)
            except CheckpointError as error:  # on all ranks
                failed, failure = True, error
        if failed:
            condition = _compared(store, chosen, ranks, machines)
            if condition.damages:
                return condition
            ranks.run_on_all(failing, partial(_raise, failure))
        ranks.run_on_all(failing, assign)
    return good


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _load(
    chosen: Checkpoint,
    state: MutableMapping[str, Any],
    found: dict[str, Any],
    files: CheckpointFiles,
    ranks: RankGroup,
    names: ParameterNames,
    once: bool,
) -> tuple[Transfer, Callable[[], None]]:
    """Read all that does not go straight into the objects of ``state``; what is returned second does the rest.

    With ``once`` nothing is read, and what is returned first has to be before the rest.
    """
    saved_size = chosen.manifest.world_size
    paired = {name: entries.pair(structure, state, name, names) for name, structure in found.items()}
    leaves = [leaf for each in paired.values() for leaf in each]
    into = {name: [leaf for leaf in each if leaf.in_place and not once] for name, each in paired.items()}
    if not once:
        files.open([leaf for leaf in leaves if leaf.in_place])
        files.read([leaf for leaf in leaves if not leaf.in_place])
    transfer = files.plan(leaves if once else [])

    def assign() -> None:
        for name in (each for each in state if each in found):
            try:
                files.read(into[name])
                entries.assign(state, name, fill(found[name]), names)
            except OSError as error:
                raise CheckpointError(f"{name!r} has changed in part: {error}") from error
            except Exception as error:
                raise CheckpointError(entries.refusal(name, reason(error))) from error
        if saved_size == ranks.size:
            rng.restore(fill(found[entries.rng_name(ranks.rank)]))
        elif ranks.rank == 0:
            own = [name for name in state if name not in found]
            more = f", and {', '.join(own)} (each rank's own) stay as they are" if own else ""
            by = f"of {saved_size} ranks" if saved_size else "of plain torch"
            _log.warning("%s is %s: random numbers start anew%s.", chosen.path, by, more)

    return transfer, assign


# -- messages


def _warn(damaged: Sequence[Condition], ranks: RankGroup) -> None:
    for each in damaged if ranks.rank == 0 else ():
        _log.warning("%s is damaged and passed over:\n%s", each.path, _indented(each))


def _log_fallback(chosen: Checkpoint, passed: Sequence[Condition], ranks: RankGroup) -> None:
    """Log what is lost by resuming from ``chosen`` although others are newer."""
    if not passed or ranks.rank != 0:
        return
    step = chosen.manifest.step
    newest = max(passed, key=lambda each: -1 if each.step is None else each.step)
    lost = max(0, (newest.step or 0) - step)
    text = f": {lost} steps are lost" if lost else ""
    _log.warning("Resumed from step %d, NOT from step %s, which is damaged%s.", step, newest.step, text)
    record.emit("fallback", step=step, damaged=newest.step, lost=lost, why=str(newest))


def _nothing_good(store: CheckpointStore, damaged: Sequence[Condition]) -> str:
    every = "\n".join(f"  {each.name}: {each}" for each in damaged)
    return (
        f"There are checkpoints in {store.root}, and none of them is good:\n{every}\n"
        "Starting from scratch would give the run up, so nothing was done. Put back what is missing, or start from "
        f"scratch with checkpoint.resume=never. `stagereg verify {shlex.quote(store.root)}` shows them again."
    )


def _not_that_one(resume: str, damaged: Condition) -> str:
    what = f"it is damaged:\n{_indented(damaged)}\n"
    if damaged.manifest is None and set(damaged.damages.values()) == {"missing"}:
        what = f"there is no {MANIFEST} in it. "
    named = resume if resume == damaged.path else f"{resume}: {damaged.path}"
    beside = shlex.quote(open_parent_store(damaged.path).root)
    return f"resume={named} is not a complete checkpoint: {what}`stagereg verify {beside}` shows which are good."


def _indented(condition: Condition) -> str:
    return "\n".join(f"  {line}" for line in condition.lines())
