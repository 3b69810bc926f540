"""Restore from directories that torch wrote, in the checkpoint directory of the run or at the path in ``resume``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import stagereg.extensions.interop.other_formats as other_formats
from stagereg.checkpoint.extension import Candidate, CheckpointSource, RestoreExtension, RestoreRequest
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.manifest import METADATA
from stagereg.checkpoint.load.store_source import StoreSource, expect_certain
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.located import with_torchs
from stagereg.checkpoint.store.open_store import local_part, open_parent_store
from stagereg.extensions.interop.matching import MatchedFiles, described
from stagereg.extensions.interop.torch_directories import DCP_WRITER

_log = logging.getLogger(__name__)


class TorchSource(StoreSource):
    """The directories that plain torch or :class:`stagereg.DcpWriter` wrote, ordered by modification time."""

    name = "torch"
    shares_reads = False

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        if self._request.is_path:
            found = open_parent_store(resume).look(resume)
            return [*listed, Candidate(_without_ranks(found, by_name=False), self.name)] if found.writer else listed
        of_torch = [_without_ranks(each) for each in self._request.store.of_torch()]
        for each in of_torch:
            expect_certain(each)
        known = {each.path: each for each in listed}
        every = with_torchs([each.found for each in listed], of_torch)
        return [known.get(each.path) or Candidate(each, self.name) for each in every]

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        return MatchedFiles(candidate.path)


class TorchDirectories(RestoreExtension):
    """Adds :class:`TorchSource` to a restore. Logs warnings for unverified directories and for unused weights files."""

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        return [TorchSource(request)]

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if request.ranks.rank != 0:
            return
        if candidate is None:
            if request.own:
                other_formats.warn(request.store.root)
        elif candidate.source == TorchSource.name and candidate.manifest is not None and not candidate.manifest.files:
            _log.warning("%s has no checksums, since plain torch wrote it. It was not verified.", candidate.path)


def _without_ranks(found: VerificationResult, by_name: bool = True) -> VerificationResult:
    """Return ``found`` for use with any world size. Its manifest lists no files if their checksums are unknown.

    The step comes from the directory's name, or with ``by_name=False`` from the saved state.
    """
    assert found.manifest is not None
    if found.damages:
        return found
    if local_part(found.path) is None:
        why = "a checkpoint that torch wrote cannot be read from a URL. Copy it to a local disk"
        return replace(found, damages={METADATA: why})
    step = found.manifest.step if by_name else described(found.path).step
    files = found.manifest.files if found.writer == DCP_WRITER else {}
    return replace(found, manifest=replace(found.manifest, step=step, world_size=0, files=files))


EXTENSIONS: tuple[type[RestoreExtension], ...] = (TorchDirectories,)
"""The restore extensions of this package."""
