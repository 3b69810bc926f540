"""The files of a step in the tier: as of any checkpoint, but that bytes come checked, from where they are."""

from __future__ import annotations

from collections.abc import Sequence

from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.index import INDEX, Index
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.reading import CheckpointFiles, Readable, Transfer
from stagereg.extensions.tiers.step_reader import BlockFile, StepReader


class TierFiles(CheckpointFiles):
    """The files of a step; :meth:`plan` fetches and checks. Raises: ``CheckpointError``, ``CorruptCheckpointError``."""

    def __init__(self, path: str, reader: StepReader) -> None:
        sizes = {name: mark.bytes for name, mark in reader.step.files.items()}
        super().__init__(path, Index.loads(reader.content(INDEX), sizes), DcpStorage())
        self._reader = reader

    def plan(self, leaves: Sequence[Leaf]) -> Transfer:
        """As of all files. Raises also: ``CorruptCheckpointError``: no machine has some of it whole."""
        transfer = super().plan(leaves)
        for name, ranges in transfer.ranges().items():
            self._reader.fetch(name, ranges)
        return transfer

    def file(self, name: str) -> Readable:
        return BlockFile(self._reader, name)
