"""Choose the checkpoint that a run resumes from, and report the skipped and refused checkpoints."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace

import stagereg.base.record as record
from stagereg.base.option_text import option
from stagereg.base.providers import needs
from stagereg.checkpoint.extension import Candidate, Rejection, RestoreRequest
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, step_of
from stagereg.checkpoint.load.seeding import Seeded
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.files import StrPath
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.foreign import expect_no_other_format
from stagereg.checkpoint.store.located import nothing_in
from stagereg.checkpoint.store.open_store import local_part, open_parent_store, open_store
from stagereg.errors import CheckpointError, CorruptCheckpointError

RESUME = ("auto", "latest", "never")  # values of `resume` other than the path of a checkpoint

_log = logging.getLogger(__name__)

NOT_EXACT, WEIGHTS_ONLY = "not exact", "weights only"
"""The status of a checkpoint that was saved without the state of a failed rank, or that retention has made smaller."""


def without_inexact(listed: Sequence[Candidate], resume: str) -> list[Candidate]:
    """Reject checkpoints that lack the state of a failed rank. If ``resume`` is not ``"auto"``, raise an error."""
    found = []
    for each in listed:
        if each.manifest is None or not each.manifest.lacks or each.found.damages:
            found.append(each)
            continue
        if resume != "auto":
            raise CheckpointError(
                f"resume={resume} is not exact: {each.path} was saved without a failed rank, and lacks "
                f"{each.manifest.lacks}. To resume from the newest exact checkpoint, use "
                f"{option('checkpoint.resume', 'auto')}. To resume from this one, add {_exact(False)}."
            )
        advice = f"To resume from the newest inexact checkpoint, add {_exact(False)}.\n"
        why = Rejection(NOT_EXACT, NOT_EXACT, f"it lacks {each.manifest.lacks}", advice=advice)
        found.append(replace(each, rejections=(*each.rejections, why)))
    return found


def nothing_listed(asked: RestoreRequest) -> CheckpointError:
    """Return the error for a path that only a missing extension could read, or ``"latest"`` without a checkpoint."""
    if asked.is_path:
        return CheckpointError(f"torch wrote {asked.resume}, and reading it {needs('interop')}")
    return CheckpointError(
        f"{option('checkpoint.resume', 'latest')} was given, but there is no complete checkpoint in "
        f"{asked.store.root}. To start from scratch in this case, use {option('checkpoint.resume', 'auto')}."
    )


def warn_of_inexact(chosen: Checkpoint, seeded: Sequence[Seeded | None], names: Collection[str]) -> None:
    """Warn that the run cannot continue exactly, because the restored checkpoint lacks states of a failed rank."""
    for each, missing in chosen.manifest.lost.items():
        if not missing:
            continue
        generators = seeded[int(each)] if len(seeded) == chosen.manifest.world_size else None
        new = [] if generators is None else generators.anew
        began = [name for name in missing if name in names and name not in new]
        how = f" Random numbers of rank {each}: {generators}." if generators else ""
        how += f" These keep the values of the program: {', '.join(began)}." if began else ""
        _log.warning(
            "The resume from step %d is not exact: %s was saved after rank %s had failed, and lacks %s of that rank.%s "
            "To repeat the steps since the newest exact checkpoint instead, add %s.",
            *(chosen.manifest.step, chosen.path, each, ", ".join(missing), how, _exact(True)),
        )


def warn_of_skipped(skipped: Sequence[Candidate], ranks: RankGroup) -> None:
    """Log on rank 0 which checkpoints were skipped as invalid. :func:`log_fallback` reports inexact checkpoints."""
    for each in skipped if ranks.rank == 0 else ():
        if each.word not in (NOT_EXACT, WEIGHTS_ONLY):
            hints = "".join(f"\n  {why.hint}" for why in each.rejections if why.hint)
            _log.warning("%s is %s and was skipped:\n%s%s", each.path, each.word, _indented(each), hints)


def log_begin(restored: Checkpoint | None, asked: RestoreRequest, dir: object, source: StrPath | None) -> None:
    """Log on rank 0 which checkpoint was restored, and in which directory ``dir`` the run saves its own checkpoints.

    Raises: ``CheckpointError``, on all ranks, if the user gave a ``source`` that contains no checkpoint.
    """
    if asked.ranks.rank == 0:
        begins = "training starts from scratch" if restored is None else f"resumed from {restored.path}"
        _log.info("stagereg: %s%s", f"checkpoints go to {dir}; " if asked.own else "", begins)
    if restored is None and source is not None:
        expect_no_other_format(os.fspath(source))
        raise CheckpointError(nothing_in(os.fspath(source)))


def log_fallback(chosen: Checkpoint, passed: Sequence[Candidate], ranks: RankGroup) -> None:
    """Log on rank 0 how many steps the run repeats because newer checkpoints were skipped."""
    if not passed or ranks.rank != 0:
        return
    step = chosen.manifest.step
    for each in passed:
        if each.word == NOT_EXACT:
            _log.warning("Skipped step %s, which is %s (%s): %s", each.step, each, _exact(True), each.path)
    newest = max(passed, key=lambda each: -1 if each.step is None else each.step)
    lost = max(0, (newest.step or 0) - step)
    repeated = f": {lost} step{'s are' if lost > 1 else ' is'} repeated" if lost else ""
    _log.warning("Resumed from step %d instead of step %s%s.", step, newest.step, repeated)
    record.emit("fallback", step=step, damaged=newest.step, lost=lost, why=str(newest))


def nothing_good(root: str, skipped: Sequence[Candidate]) -> CheckpointError:
    """Return the error for a restore that found checkpoints in ``root``, but had to skip all of them."""
    names = [each.found.name if os.path.dirname(each.path) == root else each.path for each in skipped]
    every = "\n".join(f"  {name}: {each}" for name, each in zip(names, skipped, strict=True))
    words = {each.word for each in skipped}
    reasons = sorted((why for each in skipped for why in each.rejections), key=lambda why: why.word == NOT_EXACT)
    how = "".join(dict.fromkeys(why.advice for why in reasons))
    put_back = "Restore the missing files, or " if "corrupt" in words else "Otherwise "
    known = {NOT_EXACT: ("exact", "ls"), WEIGHTS_ONLY: ("whole", "ls")}
    good, command = known.get(" ".join(words), ("valid", "verify"))
    text = (
        f"There are checkpoints in {root}, but none of them is {good}:\n"
        f"{every}\n{how}No step was taken, because starting from scratch would abandon the run. {put_back}start from "
        f"scratch with {option('checkpoint.resume', 'never')}. `stagereg {command} {shlex.quote(root)}` lists the "
        "checkpoints again."
    )
    return CheckpointError(text) if command == "ls" else CorruptCheckpointError(text)


def not_that_one(resume: str, damaged: Candidate) -> CorruptCheckpointError:
    """Return the error for ``resume=PATH`` if the checkpoint ``damaged`` at that path is incomplete or corrupt."""
    what = f"it is corrupt:\n{_indented(damaged)}\n"
    if damaged.manifest is None and set(damaged.found.damages.values()) == {"missing"}:
        there = local_part(damaged.path) is None or os.path.exists(damaged.path)
        what = f"it has no {MANIFEST}. " if there else "it does not exist. "
    named = resume if resume == damaged.path else f"{resume}: {damaged.path}"
    beside = shlex.quote(open_parent_store(damaged.path).root)
    text = f"{named} is not a complete checkpoint: {what}`stagereg verify {beside}` lists the valid checkpoints."
    return CorruptCheckpointError(text)


def _exact(chosen: bool) -> str:
    return option("checkpoint.restore.exact", chosen)


def _indented(skipped: Candidate) -> str:
    return "\n".join(f"  {line}" for line in skipped.lines())


def resolve_source(source: str) -> tuple[CheckpointStore, str]:
    """Return the store that contains ``source``, and the option ``resume`` that selects a checkpoint in the store."""
    inside, above = open_store(source), open_parent_store(source)
    name = source.rstrip("/").rpartition("/")[2]
    one = name == LATEST or step_of(name) is not None or above.look(source).manifest
    return (above, source) if one and not any(inside.checkpoints()) else (inside, "auto")


def resolve_resume(
    store: CheckpointStore, resume: str, source: StrPath | None, ranks: RankGroup
) -> tuple[CheckpointStore, str]:
    """Return the store and the ``resume`` option of a restore. ``source``, if given, replaces both. Collective."""
    found, what = (store, resume) if source is None else resolve_source(os.fspath(source))
    if what not in RESUME and os.path.basename(what) == what:  # a name without a directory
        [what, *_] = ranks.run_on_all("Nothing was restored", lambda: path_named(found, what))
    return found, what


def path_named(store: CheckpointStore, name: str) -> str:
    """Return the path of a checkpoint in ``store``, or in the working directory if ``store`` does not contain it."""
    inside, here = f"{store.root}/{name}", os.path.realpath(name)
    if not os.path.exists(here) or here == os.path.realpath(inside):
        return inside
    if not os.path.lexists(inside) and store.look(inside).manifest is None:
        return here
    raise CheckpointError(f"{name} is in {store.root} and in the working directory. Choose one: {inside} or {here}.")
