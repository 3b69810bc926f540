"""Choose the checkpoint that a run resumes from, and report the skipped and refused ones."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import stagereg.base.record as record
import stagereg.extensions.goodput.phases as phases
from stagereg.base.command import command_key
from stagereg.base.option_text import option
from stagereg.checkpoint.format.damage import InaccessibleFile, VerificationResult
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, METADATA, Checkpoint, step_of
from stagereg.checkpoint.load.seeding import Seeded
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.foreign import expect_no_other_format, warn_of_other_formats
from stagereg.checkpoint.store.located import nothing_in, with_those_of_torch
from stagereg.checkpoint.store.open_store import local_part, open_parent_store, open_store
from stagereg.errors import CheckpointError, CorruptCheckpointError
from stagereg.extensions.diagnostics.first_save import only_looks
from stagereg.extensions.interop.matching import described
from stagereg.extensions.interop.plain_dcp import is_plain_dcp
from stagereg.extensions.interop.torch_directories import DCP_WRITER
from stagereg.extensions.recovery.crashes import CrashCounter, Crashes, retry
from stagereg.extensions.tiers.inventory import TierStep
from stagereg.extensions.tiers.near import LocalTier

RESUME = ("auto", "latest", "never")  # what `resume` may be beside the path of a checkpoint

_log = logging.getLogger(__name__)


class _Quarantined(str):
    """The reason to skip a checkpoint that runs crash after, in the place of damage."""


class _Inexact(str):
    """The reason to skip a checkpoint that lacks values of a failed rank; stands among its damages."""


def candidates(store: CheckpointStore, resume: str) -> list[VerificationResult]:
    """Return the checkpoints in the order in which they are tried. Raises: ``CheckpointError``."""
    if resume not in ("auto", "latest"):
        condition = open_parent_store(resume).look(resume)
        _expect_certain(condition)
        if condition.damages == {MANIFEST: "missing"}:
            expect_no_other_format(resume)
        return [_without_ranks(condition, by_name=False) if condition.writer else condition]
    named = store.retention.pointed()
    complete, damaged = store.checkpoints()
    there = {step_of(each.name) for each in complete} | {step_of(each.name) for each in damaged} | {None}
    if step_of(named) not in there and store.retention.pointed() == named:  # no run saves there
        _report_deleted(store.root, named, resume, complete)
    pointed = store.latest()
    found = [VerificationResult(each.path, each.manifest) for each in complete]
    for each in damaged:
        _expect_certain(each)
        older = (at for at, other in enumerate(found) if _is_newer(each, other.checkpoint, pointed))
        found.insert(next(older, len(found)), each)
    of_torch = [_without_ranks(each) for each in store.of_torch()]
    for each in of_torch:
        _expect_certain(each)
    found = with_those_of_torch(found, of_torch)
    if resume == "auto":
        return found
    if not found:
        raise CheckpointError(
            f"{option('checkpoint.resume', 'latest')}, but there is no complete checkpoint in {store.root}; "
            f"{option('checkpoint.resume', 'auto')} starts from scratch."
        )
    return found[:1]


def _without_ranks(condition: VerificationResult, by_name: bool = True) -> VerificationResult:
    """Return a directory that torch wrote as a candidate: no rank has a part of its own, and the files may be unknown.

    The step is that of the directory's name, or with ``by_name=False`` of the state in the directory.
    """
    assert condition.manifest is not None
    if condition.damages:
        return condition
    if local_part(condition.path) is None:
        why = "torch wrote it, and it is read from a local directory only: copy it to one"
        return replace(condition, damages={METADATA: why})
    step = condition.manifest.step if by_name else described(condition.path).step
    files = condition.manifest.files if condition.writer == DCP_WRITER else {}
    return replace(condition, manifest=replace(condition.manifest, step=step, world_size=0, files=files))


def _report_deleted(root: str, name: str, resume: str, left: Sequence[Checkpoint]) -> None:
    """Log that the newest checkpoint was deleted. Raises: ``CheckpointError`` if ``resume`` requires it."""
    instead = f"resumes from {left[0].name}" if left else "starts from scratch"
    if resume == "latest":
        raise CheckpointError(
            f"{option('checkpoint.resume', 'latest')}, but `latest` in {root} points to {name}, which was deleted or "
            f"moved. Put {name} back, or use {option('checkpoint.resume', 'auto')}, which {instead}."
        )
    text = "stagereg: `latest` in %s points to %s, which was deleted or moved. The run %s."
    _log.warning(text, root, name, instead)


def candidates_near(
    store: CheckpointStore, resume: str, steps: Mapping[str, TierStep], branch_of: Callable[[int], int]
) -> list[VerificationResult]:
    """Return :func:`candidates` and the ``steps`` of the tier, which are by path; ``resume`` may be such a path."""
    if resume in steps:
        return [VerificationResult(resume, steps[resume].manifest)]
    if resume not in RESUME:
        named = option("checkpoint.resume", resume)
        raise CheckpointError(f"{named} is a step of the tier that no machines have between them any more.")
    found = with_steps_of_tier(candidates(store, "auto" if steps else resume), steps, branch_of)
    return found[:1] if resume == "latest" else found


def with_steps_of_tier(
    listed: Sequence[VerificationResult], steps: Mapping[str, TierStep], branch_of: Callable[[int], int]
) -> list[VerificationResult]:
    """Insert the steps of the tier, the newest first, into a list: by branch, then step, before equal ones.

    ``branch_of`` returns the branch of a checkpoint with a serial number.
    """
    found = [*listed]
    for path, each in steps.items():
        near = each.save.branch, each.save.step

        def is_older(other: VerificationResult, near: tuple[int, int] = near) -> bool:
            known = other.manifest
            return known is not None and other.path not in steps and (branch_of(known.serial), known.step) <= near

        at = next((at for at, other in enumerate(found) if is_older(other)), len(found))
        found.insert(at, VerificationResult(path, each.manifest))
    return found


def without_quarantined(
    store: CheckpointStore, resume: str, counter: CrashCounter, listed: list[VerificationResult], near: Collection[str]
) -> list[VerificationResult]:
    """Mark the checkpoints that ``"auto"`` skips for their crashes as damaged; warn if another ``resume`` takes one.

    ``near`` has the paths of the tier.
    """
    where = store if resume in ("auto", "latest") or resume in near else open_parent_store(resume)
    also = [each.checkpoint for each in listed if each.path in near and each.checkpoint is not None]
    newest = next((each.manifest.step for each in listed if each.manifest and not each.damages), -1)
    crashes = counter.crashes_of(where, also, newest if resume == "auto" else -1) if listed else {}
    for number, each in enumerate(listed):
        known = crashes.get(each.path, Crashes())
        if known.quarantined and resume == "auto":
            listed[number] = VerificationResult(
                each.path, each.manifest, {**each.damages, "restored": _Quarantined(known.why)}
            )
        elif known.quarantined:
            _log.warning("%s is restored since it was asked for, although it is %s.", each.path, known)
    return listed


def without_inexact(listed: Sequence[VerificationResult], resume: str) -> list[VerificationResult]:
    """Mark inexact checkpoints, so that ``"auto"`` skips them. Raises: ``CheckpointError`` for another ``resume``."""
    found = []
    for each in listed:
        is_damaged = each.damages and _word(each) == "damaged"
        if each.manifest is None or not each.manifest.lacks or is_damaged:
            found.append(each)
            continue
        why = f"it lacks {each.manifest.lacks}"
        if resume != "auto":
            raise CheckpointError(
                f"resume={resume} is not exact: {each.path} was saved without a failed rank, and lacks "
                f"{each.manifest.lacks}. Resume from the newest exact checkpoint with "
                f"{option('checkpoint.resume', 'auto')}; or from this one with {_exact(False)}."
            )
        found.append(VerificationResult(each.path, each.manifest, {**each.damages, "not exact": _Inexact(why)}))
    return found


def warn_of_inexact(chosen: Checkpoint, seeded: Sequence[Seeded | None], names: Collection[str]) -> None:
    """Log that a resume is not exact. ``seeded``: generators, by rank that seeded them; ``names``: of the state."""
    for each, missing in chosen.manifest.lost.items():
        if not missing:
            continue
        generators = seeded[int(each)] if len(seeded) == chosen.manifest.world_size else None
        new = [] if generators is None else generators.anew
        began = [name for name in missing if name in names and name not in new]
        how = f" Random numbers of rank {each}: {generators}." if generators else ""
        how += f" As the program begins: {', '.join(began)}." if began else ""
        _log.warning(
            "The resume from step %d is not exact: %s was saved after rank %s had failed, and lacks %s of that rank.%s "
            "To repeat the steps since the newest exact checkpoint instead, add %s.",
            *(chosen.manifest.step, chosen.path, each, ", ".join(missing), how, _exact(True)),
        )


def _is_newer(damaged: VerificationResult, than: Checkpoint | None, latest: Checkpoint | None) -> bool:
    """Whether a damaged checkpoint was committed after a complete one, as far as is known."""
    if than is None or (latest is not None and than.manifest == latest.manifest):
        return False
    if damaged.manifest is not None:
        return damaged.manifest.order > than.manifest.order
    return damaged.step is None or damaged.step > than.manifest.step


def _expect_certain(condition: VerificationResult) -> None:
    if any(isinstance(what, InaccessibleFile) for what in condition.damages.values()):
        raise CheckpointError(
            f"{condition.path} may be a good checkpoint, and it could not be looked at: {condition}. "
            f"To resume from another one, name it: {option('checkpoint.resume', 'PATH')}."
        )


def warn_of_damaged(damaged: Sequence[VerificationResult], ranks: RankGroup) -> None:
    """Log the checkpoints that are skipped, except inexact ones, which :func:`log_fallback` logs."""
    for each in damaged if ranks.rank == 0 else ():
        word, more = _word(each), ""
        if word == "not exact":
            continue
        if word == "quarantined":
            named = option("checkpoint.resume", "PATH")
            more = f"\n  If the crashes had another cause, resume from it with {named} or {retry()}."
        _log.warning("%s is %s and skipped:\n%s%s", each.path, word, _indented(each), more)


def expect_found(restored: Checkpoint | None, source: str | os.PathLike[str] | None) -> None:
    """Raise ``CheckpointError`` if there was nothing to restore in ``source``. On all ranks."""
    if restored is None and source is not None:
        expect_no_other_format(os.fspath(source))
        raise CheckpointError(nothing_in(os.fspath(source)))


def log_unchecked(step: Checkpoint) -> None:
    """Warn if nothing of a restored checkpoint was compared with a checksum, since there is none."""
    if not step.manifest.files and local_part(step.path) is not None and is_plain_dcp(step.path):
        _log.warning("%s has no checksums, since plain torch wrote it: it is loaded unchecked.", step.path)


def log_begin(
    step: Checkpoint | None, store: CheckpointStore, dir: object, resume: str | None, near: LocalTier | None
) -> None:
    """Log on rank 0 what a run resumes from, and where its checkpoints go, unless ``resume`` is ``None``."""
    begins = "training starts from scratch" if step is None else f"resumed from {step.path}"
    if step is None:
        phases.restored(0, "", "")
        if resume is not None:
            warn_of_other_formats(store.root)
    else:
        log_unchecked(step)
        origin = "survivors" if step.manifest.lost else "store"
        if near is not None and near.names(step.path):
            origin = "tier"
        phases.restored(step.manifest.step, step.path, origin)
    _log.info("stagereg: %s%s", f"checkpoints go to {dir}; " if resume is not None else "", begins)
    if step is not None and resume not in (None, *RESUME):
        _warn_of_newer(step, store)


@only_looks
def _warn_of_newer(restored: Checkpoint, store: CheckpointStore) -> None:
    """Log that the run has a newer checkpoint than the one that ``resume`` names, as in a command started again.

    A run that counts its steps from 0 is known by its command.
    """
    newest = store.latest()
    if newest is None:
        return
    ahead = newest.manifest.step - restored.manifest.step
    own = os.path.realpath(open_parent_store(restored.path).root) == os.path.realpath(store.root)
    if ahead > 0 or (not own and newest.manifest.command == command_key()):
        _log.warning(
            "stagereg: resumed from step %d, in %s, as the option names it, although this run's directory has %s%s. "
            "The checkpoints that this run saves replace %s, and delete it when they are as many as are kept. If this "
            "command was started again to continue, stop it now, and start it with %s.",
            *(restored.manifest.step, restored.path, newest.path, f", {ahead} steps ahead" * (ahead > 0)),
            *(newest.name, option("checkpoint.resume", "auto")),
        )


def log_fallback(chosen: Checkpoint, passed: Sequence[VerificationResult], ranks: RankGroup) -> None:
    """Log on rank 0 how many steps are lost since newer checkpoints were skipped."""
    if not passed or ranks.rank != 0:
        return
    step = chosen.manifest.step
    for each in passed:
        if _word(each) == "not exact":
            _log.warning("Skipped step %s, which is %s (%s): %s", each.step, each, _exact(True), each.path)
    newest = max(passed, key=lambda each: -1 if each.step is None else each.step)
    lost = max(0, (newest.step or 0) - step)
    done = "repeated" if _word(newest) == "not exact" else "lost"
    text = f"{_word(newest)}{f': {lost} step' + ('s are' if lost > 1 else ' is') + f' {done}' if lost else ''}"
    _log.warning("Resumed from step %d, NOT from step %s, which is %s.", step, newest.step, text)
    record.emit("fallback", step=step, damaged=newest.step, lost=lost, why=str(newest))


def nothing_good(root: str, skipped: Sequence[VerificationResult]) -> CheckpointError:
    """Return the error if no checkpoint is good; ``root`` is the directory, or the directory of the tier."""
    names = [each.name if os.path.dirname(each.path) == root else each.path for each in skipped]
    every = "\n".join(f"  {name}: {each}" for name, each in zip(names, skipped, strict=True))
    words = {_word(each) for each in skipped}
    how = ""
    if "quarantined" in words:
        how = (
            "What ends each run in this way may be in the program, its data or a machine: see the errors of those "
            f"runs. When it is mended, resume from the newest with {retry()}, or from another one with "
            f"{option('checkpoint.resume', 'PATH')}.\n"
        )
    if any(isinstance(what, _Inexact) for each in skipped for what in each.damages.values()):
        how += f"To resume from the newest that is not exact, give {_exact(False)}.\n"
    put_back = "Put back what is missing, or " if "damaged" in words else "Else "
    good, command = ("exact", "ls") if words == {"not exact"} else ("good", "verify")
    text = (
        f"There are checkpoints in {root}, and none of them is {good}:\n"
        f"{every}\n{how}Starting from scratch would abandon the run, so no step was taken. {put_back}start from "
        f"scratch with {option('checkpoint.resume', 'never')}. `stagereg {command} {shlex.quote(root)}` shows them "
        "again."
    )
    return CheckpointError(text) if good == "exact" else CorruptCheckpointError(text)


def not_that_one(resume: str, damaged: VerificationResult) -> CorruptCheckpointError:
    """Return the error if the checkpoint that ``resume`` names is not good."""
    what = f"it is damaged:\n{_indented(damaged)}\n"
    if damaged.manifest is None and set(damaged.damages.values()) == {"missing"}:
        there = local_part(damaged.path) is None or os.path.exists(damaged.path)
        what = f"there is no {MANIFEST} in it. " if there else "it is not there. "
    named = resume if resume == damaged.path else f"{resume}: {damaged.path}"
    beside = shlex.quote(open_parent_store(damaged.path).root)
    return CorruptCheckpointError(
        f"{named} is not a complete checkpoint: {what}`stagereg verify {beside}` shows which are good."
    )


def _exact(chosen: bool) -> str:
    return option("checkpoint.restore.exact", chosen)


def _word(condition: VerificationResult) -> str:
    kinds = {type(what) for what in condition.damages.values()}
    return "quarantined" if _Quarantined in kinds else "not exact" if _Inexact in kinds else "damaged"


def _indented(condition: VerificationResult) -> str:
    return "\n".join(f"  {line}" for line in condition.lines())


def resolve_source(source: str) -> tuple[CheckpointStore, str]:
    """Return the store and ``resume`` for the path of one checkpoint, or of a directory of checkpoints."""
    inside, above = open_store(source), open_parent_store(source)
    name = source.rstrip("/").rpartition("/")[2]
    one = name == LATEST or step_of(name) is not None or above.look(source).manifest
    return (above, source) if one and not any(inside.checkpoints()) else (inside, "auto")


def resolve_resume(
    store: CheckpointStore, resume: str, source: str | os.PathLike[str] | None, ranks: RankGroup
) -> tuple[CheckpointStore, str]:
    """Return the store and ``resume``; ``source`` replaces both. Collective."""
    found, what = (store, resume) if source is None else resolve_source(os.fspath(source))
    if what not in RESUME and os.path.basename(what) == what:  # a bare name
        [what, *_] = ranks.run_on_all("Nothing was restored", lambda: path_named(found, what))
    return found, what


def path_named(store: CheckpointStore, name: str) -> str:
    """Return the path of a bare name: in ``store``, unless only the working folder has it."""
    inside, here = f"{store.root}/{name}", os.path.realpath(name)
    if not os.path.exists(here) or here == os.path.realpath(inside):
        return inside
    if not os.path.lexists(inside) and store.look(inside).manifest is None:
        return here
    raise CheckpointError(f"{name} is both in {store.root} and in the working folder: write which, {inside} or {here}")
