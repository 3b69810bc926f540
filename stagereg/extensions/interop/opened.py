"""A checkpoint as a mapping of names to tensors, for evaluation and model surgery; :mod:`.opening` opens it.

One process without a process group reads a checkpoint of any world size. Opening reads only the manifest and the index.
A tensor is read, or mapped from a local file, when it is accessed. ``stagereg convert`` uses the same names.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from mmap import MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any

import torch

import stagereg.checkpoint.format.encoding as encoding
import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.optimizer_forms as optimizer_forms
from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.format.encoding import Leaf
from stagereg.checkpoint.format.index import Stored
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.envelope import MAP_NORESERVE
from stagereg.checkpoint.storage.reading import CheckpointFiles, File, elements_of
from stagereg.checkpoint.store.open_store import local_part
from stagereg.errors import CheckpointError, ClosedError, listed, nearest
from stagereg.extensions.interop.plain_dcp import as_torchs, by_name, open_plain_dcp
from stagereg.extensions.interop.refusing import refusing
from stagereg.extensions.interop.torch_directories import DCP_WRITER

_log = logging.getLogger(__name__)


class OpenCheckpoint(Mapping[str, torch.Tensor], AbstractContextManager["OpenCheckpoint"]):
    """The content of a checkpoint, read on access. A context manager. Not thread-safe.

    ``checkpoint["model.0.weight"]`` is the whole tensor with that dotted name, on the CPU. Writing to the tensor never
    changes the checkpoint, but a mapped tensor shares its memory with later accesses of the same name. Tensors remain
    valid after :meth:`close`.

    Attributes:
        path: the directory of the checkpoint, a path or a URL.
        manifest: the manifest of the checkpoint; ``None`` if plain torch wrote the directory.
        verified: whether the content of every file was compared with its checksum.
        entries: the names of the state's entries.
        files: the files of the checkpoint.
        structures: the nested structure of each entry, in which an unread :class:`.Leaf` stands for a tensor or object.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        structures: Mapping[str, Any],
        manifest: Manifest | None,
        verified: bool,
        reading: ExitStack,
    ) -> None:
        self.path, self.manifest, self.verified = files.path, manifest, verified
        self.entries = tuple(structures)
        self.files, self.structures = files, structures
        self._tensors, self._reading = tensors_of(structures), reading
        self._closed = False
        self._mappings: dict[str, mmap] = {}  # file name -> mapping

    @property
    def step(self) -> int | None:
        """The training step in the manifest; ``None`` without a manifest."""
        return None if self.manifest is None else self.manifest.step

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            more = f" Call entry({name!r})." if name in self.structures else nearest(name, self._tensors)
            raise KeyError(f"{self.path} has no tensor {name!r:.100}.{more}")
        return self._read(self._tensors[name])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def entry(self, name: str, rank: int | None = None) -> Any:
        """Return the saved value of an entry: a plain value, or a state dict with its tensors.

        Args:
            name: one of ``entries``; with ``rank``, also the name of a value saved with :func:`stagereg.per_rank`.
            rank: the rank whose value is returned if the ranks saved different values; by default the lowest rank.

        Raises:
            CheckpointError: the entry does not exist or cannot be read.
        """
        with refusing(f"{name!r:.100} of {self.path}"):
            structure = copy.deepcopy(self.structure(name, rank))
            for leaf in encoding.marks(structure):
                leaf.value = self._read(leaf)
            return encoding.fill(structure)

    def structure(self, name: str, rank: int | None = None) -> Any:
        """Return an entry, with a :class:`.Leaf` for each tensor. Raises ``CheckpointError`` for an unknown name."""
        own = name if rank is None else entries.rank_name(name, rank)
        if own in self.structures:
            return self.structures[own]
        if name not in self.structures:
            known = f"It has {listed(self.entries)}.{nearest(name, self.entries)}"
            raise CheckpointError(f"{self.path} has no entry {own!r}. {known}")
        return self.structures[name] if self.manifest is None else _entry(self.files, name, rank)

    def close(self) -> None:
        """Close the files. Later reads raise ``ClosedError``."""
        self._closed = True
        self.files.close()
        self._reading.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"<checkpoint {self.path}{step}: {listed(self.entries)}>"

    def _read(self, leaf: Leaf) -> Any:
        if self._closed:
            raise ClosedError(f"{self.path} was closed. Open the checkpoint again.")
        with refusing(f"{leaf.name!r:.100} of {self.path}"):
            if (found := self._mapped(leaf.stored)) is not None:
                return found
            wanted = Leaf(leaf.name, leaf.stored)
            self.files.read([wanted])
        return wanted.value

    def _mapped(self, stored: Stored) -> torch.Tensor | None:
        """Return a memory-mapped tensor; ``None`` if the tensor is not stored as one aligned range of a local file."""
        if stored.dtype is None or stored.chunks is None or len(stored.chunks) != 1:
            return None
        [chunk] = stored.chunks
        file = self.files.file(chunk.file)
        unaligned = chunk.offset % stored.dtype.itemsize != 0
        as_torch = isinstance(chunk.layout, str)
        if not isinstance(file, File) or not file.local or not chunk.length or as_torch or unaligned:
            return None
        if chunk.file not in self._mappings:  # never closed, since tensors may use the mapping
            flags = MAP_PRIVATE | MAP_NORESERVE
            self._mappings[chunk.file] = mmap(file.stream.fileno(), 0, flags=flags, prot=PROT_READ | PROT_WRITE)
        if chunk.offset + chunk.length > len(mapping := self._mappings[chunk.file]):
            raise OSError(f"{chunk.file} ends at byte {len(mapping)}")
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=chunk.length, offset=chunk.offset)
        return elements_of(data, chunk, stored.dtype)


def open_found(chosen: VerificationResult, verify: bool, reading: ExitStack) -> OpenCheckpoint:
    """Open the checkpoint ``chosen``. The result owns ``reading``. Raises ``CheckpointError`` if unreadable."""
    if chosen.writer:
        if local_part(chosen.path) is None:
            raise CheckpointError(f"Cannot read {chosen.path} from a URL: torch wrote it. Copy it to a local disk.")
        files, structures = open_plain_dcp(chosen.path)
        verified = verify and chosen.writer == DCP_WRITER
        return OpenCheckpoint(files, by_name(files, structures), None, verified, reading.pop_all())
    assert chosen.checkpoint is not None
    try:
        files = CheckpointFiles.of(chosen.checkpoint, DcpStorage())
    except OSError as error:
        more = "If a run has just deleted this checkpoint, a newer checkpoint exists: try again."
        raise CheckpointError(f"{chosen.path} was not read: {error}. {more}") from error
    names = sorted(name for name in files.index.state if name.split(".")[0] != entries.RESERVED)
    structures = {name: _entry(files, name) for name in names}
    return OpenCheckpoint(files, structures, chosen.manifest, verify, reading.pop_all())


def _entry(files: CheckpointFiles, name: str, rank: int | None = None) -> Any:
    """Return an entry as saved by ``rank``, by default the lowest rank. Optimizer states have torch's form."""
    structure = files.structure(name, rank)
    return as_torchs(structure) if optimizer_forms.is_by_name(structure) else structure


def tensors_of(structures: Mapping[str, Any]) -> dict[str, Leaf]:
    every = (each for name, structure in structures.items() for each in encoding.leaves(structure, name))
    return {name: leaf for name, leaf in every if type(leaf) is Leaf and leaf.stored.dtype is not None}
