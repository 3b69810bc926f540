"""The local tier of a run as a source of restores: complete steps, with every byte verified before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointSource, RestoreRequest
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.index import INDEX, Index
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.reading import CheckpointFiles, Readable, Transfer
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.inventory import TierStep
from stagereg.extensions.tiers.near import LocalTier
from stagereg.extensions.tiers.step_reader import BlockFile, StepReader


class TierSource(CheckpointSource):
    """Offers steps of the tier to a restore. A step of the tier precedes the same step of the checkpoint directory."""

    name = "tier"
    shares_reads = False  # each rank fetches its bytes from the nearest machine that has them

    def __init__(self, tier: LocalTier, request: RestoreRequest) -> None:
        self._tier, self._request = tier, request
        self.root = "" if tier.shared else os.path.dirname(tier.folder.path)
        self._steps: dict[str, TierStep] = {}  # path -> step

    def claims(self, path: str) -> bool:
        return self._tier.names(path)

    def survey(self) -> bool:
        self._steps = {self._tier.path_of(each): each for each in self._tier.steps()}
        return bool(self._steps)

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        if not self._request.is_path:
            return with_steps_of_tier(listed, self._steps, self._tier.branch_of)
        if resume not in self._steps:
            named = option("checkpoint.resume", resume)
            raise CheckpointError(f"{named} is a step of the local tier that is no longer complete on the machines.")
        return [_candidate(resume, self._steps[resume])]

    def files(self, candidate: Candidate, index: bytes | None) -> CheckpointFiles:
        with ExitStack() as opened:
            files = TierFiles(candidate.path, opened.enter_context(self._tier.reading(self._steps[candidate.path])))
            files.push(opened.pop_all())
        return files

    def restored(self, candidate: Candidate, files: CheckpointFiles) -> None:
        assert isinstance(files, TierFiles)
        found = self._request.ranks.run_on_all(f"Cannot restore {candidate.path}", lambda: files.reader.found)
        self._tier.restored(self._steps[candidate.path], found)


def with_steps_of_tier(
    listed: Sequence[Candidate], steps: Mapping[str, TierStep], branch_of: Callable[[int], int]
) -> list[Candidate]:
    """Return the checkpoints ``listed``, with the steps of the tier inserted by branch and step, the newest first.

    A step of the tier precedes the checkpoint of the same step. ``steps``: by path. ``branch_of`` returns the branch of
    the checkpoint with a serial number.
    """
    found = [*listed]
    for path, each in steps.items():
        near = each.save.branch, each.save.step

        def is_older(other: Candidate, near: tuple[int, int] = near) -> bool:
            known = None if other.source == TierSource.name else other.manifest
            return known is not None and (branch_of(known.serial), known.step) <= near

        at = next((at for at, other in enumerate(found) if is_older(other)), len(found))
        found.insert(at, _candidate(path, each))
    return found


def _candidate(path: str, step: TierStep) -> Candidate:
    return Candidate(VerificationResult(path, step.manifest), TierSource.name)


class TierFiles(CheckpointFiles):
    """The files of one step. Raises: ``CheckpointError`` if no machine has the index of the step.

    ``reader``: the block reader, which stays open until these files are closed.
    """

    def __init__(self, path: str, reader: StepReader) -> None:
        sizes = {name: mark.bytes for name, mark in reader.step.files.items()}
        super().__init__(path, Index.loads(reader.content(INDEX), sizes), DcpStorage())
        self.reader = reader

    def plan(self, leaves: Sequence[Leaf]) -> Transfer:
        """Plan the restore, then read the blocks. Raises: ``CorruptCheckpointError`` if a block has no valid copy."""
        transfer = super().plan(leaves)
        for name, ranges in transfer.ranges().items():
            self.reader.fetch(name, ranges)
        return transfer

    def file(self, name: str) -> Readable:
        return BlockFile(self.reader, name)
