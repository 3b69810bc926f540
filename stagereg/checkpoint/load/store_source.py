"""Lists the checkpoints that a run can resume from in its checkpoint directory, or at the path in ``resume``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointSource, RestoreRequest
from stagereg.checkpoint.format.damage import Found, InaccessibleFile, VerificationResult, share_of_rank
from stagereg.checkpoint.format.manifest import MANIFEST, Checkpoint, step_of
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.foreign import expect_no_other_format
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import CheckpointError

_log = logging.getLogger(__name__)


class StoreSource(CheckpointSource):
    """The source for the checkpoints that stagereg wrote: in the checkpoint directory, or at the path in ``resume``."""

    name = "store"

    def __init__(self, request: RestoreRequest) -> None:
        self._request = request

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        found = self._named(resume) if self._request.is_path else self._all(resume)
        return [*listed, *(Candidate(each, self.name) for each in found)]

    def lease(self, candidate: Candidate) -> AbstractContextManager[None]:
        return self._store_of(candidate).readers.read_lease(candidate.path)

    def check(self, candidate: Candidate, rank: int, size: int) -> dict[str, Found]:
        assert candidate.manifest is not None
        return self._store_of(candidate).contents(candidate.path, share_of_rank(candidate.manifest.files, rank, size))

    def is_complete(self, candidate: Candidate) -> bool:
        return not self._store_of(candidate).look(candidate.path).damages

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        assert candidate.checkpoint is not None
        return CheckpointFiles.of(candidate.checkpoint, self._request.storage, index)

    def corrupt(self, candidate: Candidate) -> None:
        self._store_of(candidate).retention.distrusted.add(candidate.path)

    def _store_of(self, candidate: Candidate) -> CheckpointStore:
        return open_parent_store(candidate.path) if self._request.is_path else self._request.store

    def _named(self, path: str) -> list[VerificationResult]:
        found = open_parent_store(path).look(path)
        expect_certain(found)
        if found.damages == {MANIFEST: "missing"}:
            expect_no_other_format(path)
        return [] if found.writer else [found]

    def _all(self, resume: str) -> list[VerificationResult]:
        store = self._request.store
        named = store.retention.pointed()
        complete, damaged = store.checkpoints()
        there = {step_of(each.name) for each in complete} | {step_of(each.name) for each in damaged} | {None}
        if step_of(named) not in there and store.retention.pointed() == named:  # not moved meanwhile
            _report_deleted(store.root, named, resume, complete)
        pointed = store.latest()
        found = [VerificationResult(each.path, each.manifest) for each in complete]
        for each in damaged:
            expect_certain(each)
            older = (at for at, other in enumerate(found) if _is_newer(each, other.checkpoint, pointed))
            found.insert(next(older, len(found)), each)
        return found


def expect_certain(found: VerificationResult) -> None:
    """Raise ``CheckpointError`` if a file cannot be accessed: the checkpoint is then not known to be corrupt."""
    if any(isinstance(what, InaccessibleFile) for what in found.damages.values()):
        raise CheckpointError(
            f"{found.path} may be a valid checkpoint, but cannot be accessed: {found}. "
            f"To resume from another checkpoint, add {option('checkpoint.resume', 'PATH')}."
        )


def _report_deleted(root: str, name: str, resume: str, left: Sequence[Checkpoint]) -> None:
    """Log that ``latest`` points to a deleted checkpoint. If ``resume="latest"``, raise ``CheckpointError``."""
    instead = f"resumes from {left[0].name}" if left else "starts from scratch"
    if resume == "latest":
        raise CheckpointError(
            f"{option('checkpoint.resume', 'latest')} was given, but `latest` in {root} points to {name}, which was "
            f"deleted or moved. Move {name} back, or use {option('checkpoint.resume', 'auto')}, which {instead}."
        )
    text = "stagereg: `latest` in %s points to %s, which was deleted or moved. The run %s."
    _log.warning(text, root, name, instead)


def _is_newer(damaged: VerificationResult, than: Checkpoint | None, latest: Checkpoint | None) -> bool:
    """Return whether a corrupt checkpoint may be newer than ``than``. ``latest``: the newest complete checkpoint."""
    if than is None or (latest is not None and than.manifest == latest.manifest):
        return False
    if damaged.manifest is not None:
        return damaged.manifest.order > than.manifest.order
    return damaged.step is None or damaged.step > than.manifest.step
