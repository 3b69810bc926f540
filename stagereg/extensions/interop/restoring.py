"""Restores from directories that torch wrote: those of a run's directory, and one that ``resume`` names."""

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
from stagereg.checkpoint.store.located import with_those_of_torch
from stagereg.checkpoint.store.open_store import local_part, open_parent_store
from stagereg.extensions.interop.matching import MatchedFiles, described
from stagereg.extensions.interop.torch_directories import DCP_WRITER

_log = logging.getLogger(__name__)


class TorchSource(StoreSource):
    """Directories that plain torch or :class:`stagereg.DcpWriter` wrote, by the time at which they were written."""

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
        every = with_those_of_torch([each.found for each in listed], of_torch)
        return [known.get(each.path) or Candidate(each, self.name) for each in every]

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        return MatchedFiles(candidate.path)


class TorchDirectories(RestoreExtension):
    """Offers :class:`TorchSource`; warns of directories without checksums, and of weights that no restore reads."""

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        return [TorchSource(request)]

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if request.ranks.rank != 0:
            return
        if candidate is None:
            if request.own:
                other_formats.warn(request.store.root)
        elif candidate.source == TorchSource.name and candidate.manifest is not None and not candidate.manifest.files:
            _log.warning("%s has no checksums, since plain torch wrote it: it is loaded unchecked.", candidate.path)


def _without_ranks(found: VerificationResult, by_name: bool = True) -> VerificationResult:
    """Return a directory as a candidate: no rank has a part of its own, and the files may be unknown.

    The step is that of the directory's name, or with ``by_name=False`` of the state in the directory.
    """
    assert found.manifest is not None
    if found.damages:
        return found
    if local_part(found.path) is None:
        why = "torch wrote it, and it is read from a local directory only: copy it to one"
        return replace(found, damages={METADATA: why})
    step = found.manifest.step if by_name else described(found.path).step
    files = found.manifest.files if found.writer == DCP_WRITER else {}
    return replace(found, manifest=replace(found.manifest, step=step, world_size=0, files=files))


EXTENSIONS: tuple[type[RestoreExtension], ...] = (TorchDirectories,)
"""What every restore has of this extension."""
