"""Chooses a checkpoint to resume from, and loads it into the objects of a run.

Rank 0 lists the store, so that all ranks use the same list. The content of the files is checked against the manifest,
each rank taking a share. Then every rank opens what it needs, and reads what does not go straight into a live tensor.
The ranks agree after each part, and no object changes before all of them have come that far. What is read into live
tensors comes last, from files that were checked; if the disk fails then, the error says that an object has changed in
part.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import stagereg.checkpoint.entries as entries
import stagereg.checkpoint.rng as rng
import stagereg.record as record
from stagereg.checkpoint.choosing import Choice, choice, compared, newest_good
from stagereg.checkpoint.damage import Condition, damage_lines
from stagereg.checkpoint.encoding import Leaf, fill
from stagereg.checkpoint.manifest import MANIFEST, Checkpoint
from stagereg.checkpoint.rank_group import RankGroup
from stagereg.checkpoint.reading import CheckpointFiles
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import CheckpointError

__all__ = ["restore"]

_log = logging.getLogger(__name__)

_SHOWN, _LONGEST = 8, 300
"""Lines, and characters of each, of an error that an object has when it takes its state."""


def restore(
    store: CheckpointStore, resume: str, verify: str, state: MutableMapping[str, Any], own: Storage, ranks: RankGroup
) -> Checkpoint | None:
    """Load what ``resume`` stands for into the objects and values of ``state``. Collective.

    A checkpoint is read through the storage that wrote it: ``own``, the checkpointer's, if it is that one. One that is
    found to be damaged before the reading into live tensors begins has got into no object; ``"auto"`` then goes on to
    the one before, and logs that.

    Args:
        store: the directory of checkpoints.
        resume: ``"auto"``, ``"latest"`` or the path of a checkpoint.
        verify: ``"full"`` looks at the content of every file first, ``"fast"`` at manifest and sizes.
        state: as given to ``Checkpointer.restore``.
        own: the checkpointer's storage.
        ranks: who restores.

    Returns:
        The checkpoint, or ``None`` if ``resume`` is ``"auto"`` and there is nothing to go on from.

    Raises:
        CheckpointError: on all ranks: what was asked for is not there or damaged; there are checkpoints, and
            ``"auto"`` found none of them good; some rank's objects do not take what was saved; reading failed after
            the check, and an object has changed in part.
    """
    failing = f"Nothing was restored from {store.root}"
    listed = ranks.run_on_all(failing, lambda: choice(store, resume) if ranks.rank == 0 else Choice(()))[0]
    damaged = list(listed.damaged)
    if resume == "auto":
        _warn(damaged, ranks)
    for candidate in listed.candidates:
        where = store if resume in ("auto", "latest") else open_parent_store(candidate.path)
        condition = Condition(candidate.path, candidate.manifest)
        if verify == "full":
            condition = compared(where, candidate, ranks)
        if not condition.damages:
            with ExitStack() as opened:
                assign, condition = _read(where, candidate, verify, state, own, ranks, opened)
                if assign is not None:
                    ranks.run_on_all(f"{candidate.path} could not be restored", assign)
            if assign is not None:
                passed = [each for each in damaged if each not in listed.damaged]
                _log_fallback(candidate, [*passed, *listed.newer(candidate)], ranks)
                return candidate
        where.distrusted.add(candidate.path)
        damaged.append(condition)
        if resume == "auto":
            _warn([condition], ranks)
    if not damaged:
        return None
    if resume == "auto":
        raise CheckpointError(_nothing_good(store, damaged))
    found = newest_good(open_parent_store(damaged[0].path), listed.others, verify == "full", ranks)
    raise CheckpointError(_not_that_one(resume, damaged[0], found))


def _read(
    store: CheckpointStore,
    chosen: Checkpoint,
    verify: str,
    state: MutableMapping[str, Any],
    own: Storage,
    ranks: RankGroup,
    opened: ExitStack,
) -> tuple[Callable[[], None] | None, Condition]:
    """Prepare what this rank needs; what puts it in place, or what is wrong with the files if they cannot be read.

    Raises:
        CheckpointError: on all ranks, if some rank cannot read it although its files are what was written.
    """
    assign: Callable[[], None] | None = None
    failure: Exception | None = None
    try:
        files = opened.enter_context(CheckpointFiles(chosen, own))
        assign = _load(chosen, state, files, ranks.rank, ranks.size)
    except Exception as error:
        failure = error
    good = Condition(chosen.path, chosen.manifest)
    # What was just found to be good need not be read again for an error about what is, or is not, in it.
    in_it = isinstance(failure, CheckpointError) and failure.__cause__ is None
    failed = ranks.exchange(None if failure is None else not in_it)
    if all(each is None for each in failed):
        return assign, good
    if verify != "full" or True in failed:
        condition = compared(store, chosen, ranks)
        if condition.damages:
            return None, condition

    def fail() -> None:
        if failure is not None:
            raise failure

    ranks.run_on_all(f"{chosen.path} could not be restored", fail)
    return None, good  # not reached: some rank has failed


def _load(
    chosen: Checkpoint, state: MutableMapping[str, Any], files: CheckpointFiles, rank: int, size: int
) -> Callable[[], None]:
    """Read all that does not go straight into the objects of ``state``; what is returned does the rest."""
    saved_size = chosen.manifest.world_size
    found = entries.find(files, state, saved_size, rank, size)
    into: dict[str, list[Leaf]] = {}
    for name, structure in found.items():
        leaves = entries.pair(structure, state.get(name))
        into[name] = files.open_in_place(leaves)
        files.read([leaf for leaf in leaves if not leaf.in_place])

    def assign() -> None:
        for name in state:
            try:
                files.read(into[name])
                entries.assign(state, name, fill(found[name]))
            except OSError as error:
                raise CheckpointError(f"{name!r} has changed in part: {error}") from error
            except Exception as error:
                text = f"{name!r} does not take what was saved under its name: {_short(error)}"
                raise CheckpointError(text) from error
        if saved_size == size:
            rng.restore(fill(found[entries.rng_name(rank)]))
        elif rank == 0:
            _log.warning("%s is of %d ranks: random numbers start anew.", chosen.path, saved_size)

    return assign


def _warn(damaged: Sequence[Condition], ranks: RankGroup) -> None:
    """Log each, on one rank for all."""
    for each in damaged if ranks.rank == 0 else ():
        _log.warning("%s is damaged and passed over:\n%s", each.path, _indented(each))


def _log_fallback(chosen: Checkpoint, passed: Sequence[Condition], ranks: RankGroup) -> None:
    """Log what is lost by resuming from ``chosen`` although others are newer."""
    if not passed or ranks.rank != 0:
        return
    step = chosen.manifest.step
    newest = max(passed, key=lambda each: -1 if each.step is None else each.step)
    lost = max(0, (newest.step or 0) - step)
    text = f": {lost} step{'' if lost == 1 else 's'} {'is' if lost == 1 else 'are'} lost" if lost else ""
    _log.warning("Resumed from step %d, NOT from step %s, which is damaged%s.", step, newest.step, text)
    record.emit("fallback", step=step, damaged=newest.step, lost=lost, why=str(newest))


def _nothing_good(store: CheckpointStore, damaged: Sequence[Condition]) -> str:
    every = "\n".join(f"  {each.name}: {each}" for each in damaged)
    return (
        f"There are checkpoints in {store.root}, and none of them is good:\n{every}\n"
        "Starting from scratch would give the run up, so nothing was done. Put back what is missing, or start from "
        f"scratch with checkpoint.resume=never. `stagereg verify {shlex.quote(store.root)}` shows them again."
    )


def _not_that_one(resume: str, damaged: Condition, good: Checkpoint | None) -> str:
    what = f"it is damaged:\n{_indented(damaged)}\n"
    if damaged.manifest is None and all(each.what == "missing" for each in damaged.damages):
        what = f"there is no {MANIFEST} in it. "
    offer = "There is no good one beside it."
    if good is not None:
        offer = f"The newest good one is of step {good.manifest.step}: checkpoint.resume={good.path}"
    named = resume if resume == damaged.path else f"{resume}: {damaged.path}"
    return f"resume={named} is not a complete checkpoint: {what}{offer}"


def _short(error: Exception) -> str:
    """The start of an object's error about its state, which may name every tensor of a model."""
    lines = [line[:_LONGEST] + " ..." * (len(line) > _LONGEST) for line in str(error).splitlines()]
    more = len(lines) - _SHOWN
    return "\n".join(lines if more <= 0 else [*lines[:_SHOWN], f"and {more} more lines"])


def _indented(condition: Condition) -> str:
    return "\n".join(f"  {line}" for line in damage_lines(condition.damages))
