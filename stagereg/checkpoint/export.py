"""A checkpoint as one file that needs no checkpointer: for ``torch.load``, or for whatever reads safetensors.

Read by one process without a process group, whatever number of ranks wrote it: sharded tensors become whole, the
shards of a ``ZeroRedundancyOptimizer`` the state dict of the optimizer inside. The file is written beside its final
name and flushed first, so it is complete or absent.

A ``.pt`` holds everything, and so does the memory of the process for a while. A ``.safetensors`` holds tensors only; it
is written tensor by tensor, since its layout (huggingface.co/docs/safetensors, "Format") is known before the first one
is read. Tied tensors are in either of them once a name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

import stagereg.checkpoint.encoding as encoding
import stagereg.checkpoint.entries as entries
import stagereg.registry as registry
from stagereg.checkpoint.advice import causes
from stagereg.checkpoint.encoding import Leaf
from stagereg.checkpoint.index import TensorEntry
from stagereg.checkpoint.manifest import Checkpoint, new_token
from stagereg.checkpoint.rank_group import reason
from stagereg.checkpoint.reading import CheckpointFiles
from stagereg.checkpoint.storage.safetensors import DTYPES, METADATA, head
from stagereg.errors import CheckpointError, nearest
from stagereg.kernel.memory import view_of

__all__ = ["SUFFIXES", "Export", "write_pt"]

SUFFIXES = (".pt", ".pth", ".safetensors")
"""What a file may be called."""


def _write_file(out: Path, replace: bool, write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a file beside ``out``, flush it, and rename it.

    Raises:
        CheckpointError: ``out`` is there already, and ``replace`` is not set. What ``write`` raises. ``OSError``.
    """
    beside = out.with_name(f".{out.name}.{new_token()}.tmp")
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if not replace and os.path.lexists(out):
            raise CheckpointError(f"{out} is there already; --force replaces it.")
        beside.replace(out)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def write_pt(state: Any, out: Path, replace: bool) -> None:
    """Write a file for ``torch.load(weights_only=True)``, which is tried.

    Raises:
        CheckpointError: that would refuse it, or as :class:`Export`.write. ``OSError``.
    """

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of torch's archive, which could not be ended after what the file has raised
            raise next((each for each in causes(error) if isinstance(each, OSError)), error) from None
        _expect_loadable(file)

    _write_file(out, replace, write)


class Export:
    """What is to be written of one checkpoint.

    Args:
        checkpoint: a complete one, whose content has been looked at.
        only: one name of the state that was saved; its own names are then the names in the file. ``None`` for all.

    Raises:
        CheckpointError: it has no such name, or was written by a storage that is not there.
    """

    def __init__(self, checkpoint: Checkpoint, only: str | None = None) -> None:
        self._step, self._only = checkpoint.manifest.step, only
        self._files = CheckpointFiles(checkpoint, registry.build("storage", "dcp"))
        self._parts = entries.parts(self._files, checkpoint.manifest.world_size)
        if only is not None:
            if only not in self._parts:
                known = entries.listed(list(self._parts))
                text = f"There is no {only!r} in {checkpoint.path}, only {known}.{nearest(only, self._parts)}"
                raise CheckpointError(text)
            self._parts = {only: self._parts[only]}

    def write(self, out: Path, replace: bool) -> tuple[list[str], list[str]]:
        """Write the file.

        Args:
            out: its path; the suffix, one of :data:`SUFFIXES`, is its format.
            replace: whether it may take the place of a file that is there.

        Returns:
            Of the names of the state those that are in the file, and the names of what such a file cannot hold.

        Raises:
            CheckpointError: such a file cannot hold a tensor, or it is there already. ``OSError``.
        """
        if out.suffix != ".safetensors":
            self._files.read([leaf for structure in self._parts.values() for leaf in encoding.marks(structure)])
            read = {name: encoding.fill(structure) for name, structure in self._parts.items()}
            write_pt(read if self._only is None else read[self._only], out, replace)
            return sorted(self._parts), []
        tensors: dict[str, tuple[Leaf, TensorEntry]] = {}
        others: list[str] = []
        held: set[str] = set()
        for part, structure in self._parts.items():
            for name, leaf in encoding.leaves(structure, part):
                name = name if self._only is None else name.removeprefix(f"{self._only}.")
                entry = self._files.index.tensor(leaf.name) if isinstance(leaf, Leaf) else None
                if entry is None:
                    others.append(name)
                else:
                    tensors[name] = leaf, entry
                    held.add(part)
        _write_file(out, replace, lambda file: self._write_tensors(file, tensors))
        return sorted(held), sorted(others)

    def _write_tensors(self, file: IO[bytes], tensors: Mapping[str, tuple[Leaf, TensorEntry]]) -> None:
        for name, (_, entry) in tensors.items():
            if entry.dtype not in DTYPES or name == METADATA:
                raise CheckpointError(f"safetensors cannot hold {name!r}, which is {entry.dtype}; write a .pt")
        # As the library does it: by size of the elements, so that every tensor is aligned, and then by name.
        order = sorted(tensors.items(), key=lambda item: (-item[1][1].dtype.itemsize, item[0]))
        kinds = {name: (entry.dtype, entry.shape) for name, (_, entry) in order}
        file.write(head(kinds, {"format": "pt", "step": str(self._step)}))
        for _, (leaf, _) in order:
            self._files.read([leaf])
            if leaf.value.numel():
                file.write(view_of(leaf.value.contiguous()))
            leaf.value = None


def _expect_loadable(file: IO[bytes]) -> None:
    """Raise ``CheckpointError`` if ``torch.load(weights_only=True)`` would refuse the ``.pt`` just written."""
    file.flush()
    try:
        torch.load(str(file.name), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        text = f"torch.load(weights_only=True) would refuse it ({reason(error)}); a .safetensors has the tensors alone."
        raise CheckpointError(text) from error
