"""Reads a committed checkpoint with the loader of the core, for tests of the core, which need no extension."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from stagereg.checkpoint.format.encoding import Leaf, fill, leaves, marks
from stagereg.checkpoint.state.entries import RESERVED
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.located import newest


class Reading:
    """A checkpoint whose values are read when they are accessed. Attributes: ``path``, ``step``, ``entries``."""

    def __init__(self, files: CheckpointFiles, step: int) -> None:
        self._files, self.path, self.step = files, files.path, step
        self.entries = sorted(name for name in files.index.state if name.split(".")[0] != RESERVED)

    def entry(self, name: str, rank: int | None = None) -> Any:
        """Return one entry, optimizers by the names of parameters; for ``rank``, else for the lowest rank."""
        names = [name, f"{name}.rank{rank}"]
        structure = self._files.structure(names[-1] if names[-1] in self.entries else name, rank)
        self._files.read([*marks(structure)])
        return fill(structure)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the whole tensor with this dotted name; no other value is read."""
        entries = (each for each in self.entries if f"{name}.".startswith(f"{each}."))
        found = (dict(leaves(self._files.structure(each), each)) for each in entries)
        [leaf] = [each[name] for each in found if name in each]
        assert isinstance(leaf, Leaf)
        self._files.read([leaf])
        assert isinstance(leaf.value, torch.Tensor)
        return leaf.value

    def state(self) -> dict[str, Any]:
        """Return all entries by name."""
        return {name: self.entry(name) for name in self.entries}


@contextmanager
def opened(path: str | os.PathLike[str], verify: bool = False) -> Iterator[Reading]:
    """Open a checkpoint, or the newest good one of a directory; ``verify`` compares the content of all files first."""
    with ExitStack() as reading:
        chosen, _ = newest(os.fspath(path), verify, reading)
        assert chosen.checkpoint is not None
        files = reading.enter_context(CheckpointFiles.of(chosen.checkpoint, DcpStorage()))
        yield Reading(files, chosen.checkpoint.manifest.step)
