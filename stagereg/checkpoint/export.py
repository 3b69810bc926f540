"""A checkpoint as one file that needs no checkpointer: for ``torch.load``, or for whatever reads safetensors.

Read by one process without a process group, whatever number of ranks wrote it: sharded tensors become whole, the
shards of a ``ZeroRedundancyOptimizer`` the state dict of the optimizer inside. The file is written beside its final
name and flushed first, so it is complete or absent.

A ``.pt`` holds everything, and so does the memory of the process for a while. What ``torch.load(weights_only=True)``
would not take is there in plain: NumPy's numbers as Python's, a ``defaultdict`` as a ``dict``. A ``.safetensors`` holds
tensors only; it is written tensor by tensor, since its layout (huggingface.co/docs/safetensors, "Format") is known
before the first one is read. Tied tensors are in either of them once a name.
"""

from __future__ import annotations

import _codecs
import contextlib
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import stagereg.checkpoint.encoding as encoding
import stagereg.checkpoint.sources as sources
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

__all__ = ["SUFFIXES", "Export"]

SUFFIXES = (".pt", ".pth", ".safetensors")
"""What a file may be called."""


@dataclass(frozen=True)
class _Item:
    """A leaf of the state: whose it is, what the file calls it, and, of a tensor, where it is and what it is like."""

    part: str
    name: str
    leaf: Leaf
    tensor: TensorEntry | None


class Export:
    """What is to be written of one checkpoint.

    Args:
        checkpoint: a complete one, whose content has been looked at.
        only: one name of the state that was saved; its own names are then the names in the file. ``None`` for all.

    Attributes:
        merged: of the names of the state that was saved, those that were saved in shards.

    Raises:
        CheckpointError: it has no such name, or was written by a storage that is not there.
    """

    def __init__(self, checkpoint: Checkpoint, only: str | None = None) -> None:
        self._path, self._step, self._only = checkpoint.path, checkpoint.manifest.step, only
        self._files = CheckpointFiles(checkpoint, registry.build("storage", "dcp"), foreign=True)
        parts, merged = sources.parts(self._files, checkpoint.manifest.world_size)
        if only is not None and only not in parts:
            known = sources.listed(list(parts))
            raise CheckpointError(f"There is no {only!r} in {self._path}, only {known}.{nearest(only, parts)}")
        self._parts = parts if only is None else {only: parts[only]}
        self.merged = [name for name in merged if name in self._parts]
        self._items = [
            _Item(part, name if only is None else name.removeprefix(f"{only}."), leaf, self._tensor(leaf))
            for part, value in self._parts.items()
            for name, leaf in encoding.leaves(value, part)
        ]

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return sum(item.tensor is not None for item in self._items)

    def names(self, out: Path) -> list[str]:
        """Return of the names of the state those that are in ``out``; neither the step nor the generators are."""
        if out.suffix != ".safetensors":
            return sorted(self._parts)
        return sorted({item.part for item in self._items if item.tensor is not None})

    def needs(self, out: Path) -> int:
        """Return the bytes of tensors that are in memory at once while ``out`` is written."""
        sizes = [item.tensor.nbytes for item in self._items if item.tensor is not None]
        return max(sizes, default=0) if out.suffix == ".safetensors" else sum(sizes)

    def left_out(self, out: Path) -> list[str]:
        """Return the names of what ``out`` cannot hold."""
        if out.suffix != ".safetensors":
            return []
        return sorted(item.name for item in self._items if item.tensor is None)

    def write(self, out: Path, replace: bool) -> None:
        """Write the file.

        Args:
            out: its path; the suffix, one of :data:`SUFFIXES`, is its format.
            replace: whether it may take the place of a file that is there.

        Raises:
            CheckpointError: such a file cannot hold a tensor, it is there already, or what ``torch.load`` would
                refuse is in it. ``OSError``.
        """
        write = self._write_tensors if out.suffix == ".safetensors" else self._write_all
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

    def _tensor(self, leaf: Any) -> TensorEntry | None:
        return self._files.index.tensor(leaf.name) if isinstance(leaf, Leaf) else None

    def _write_all(self, file: IO[bytes]) -> None:
        self._files.read([leaf for part in self._parts.values() for leaf in encoding.marks(part)])
        read = {name: encoding.fill(part) for name, part in self._parts.items()}
        try:
            torch.save(_plain(read if self._only is None else read[self._only]), file)
        except RuntimeError as error:  # of torch's archive, which could not be ended after what the file has raised
            raise next((each for each in causes(error) if isinstance(each, OSError)), error) from None
        file.flush()
        try:
            torch.load(str(file.name), map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            named = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(str(file.name)))
            raise CheckpointError(
                f"torch.load(weights_only=True) would refuse it ({named or reason(error)}); a .safetensors has the "
                "tensors alone."
            ) from error

    def _write_tensors(self, file: IO[bytes]) -> None:
        tensors = {item.name: (item.leaf, item.tensor) for item in self._items if item.tensor is not None}
        # As the library does it: by size of the elements, so that every tensor is aligned, and then by name.
        order = sorted(tensors, key=lambda name: (-tensors[name][1].dtype.itemsize, name))
        for name in order:
            if tensors[name][1].dtype not in DTYPES:
                raise CheckpointError(
                    f"safetensors cannot hold {name!r}, which is {tensors[name][1].dtype}; write a .pt"
                )
            if name == METADATA:
                raise CheckpointError(f"safetensors cannot hold a tensor called {name!r}; write a .pt")
        kinds = {name: (tensors[name][1].dtype, tensors[name][1].shape) for name in order}
        file.write(head(kinds, {"format": "pt", "step": str(self._step)}))
        for name in order:
            leaf = tensors[name][0]
            self._files.read([leaf])
            if leaf.value.numel():
                file.write(view_of(leaf.value.contiguous()))
            leaf.value = None


class _NoBytes:
    """Stands for ``b""``, which would be pickled as a call of ``bytes``."""

    def __reduce__(self) -> Any:
        return _codecs.encode, ("", "latin1")


def _plain(value: Any) -> Any:
    """Return a value in types that torch reads, in its own containers; an ``OrderedDict`` may have attributes."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if kind is bytes:
        return value or _NoBytes()
    if kind in (list, tuple, set):
        return kind(map(_plain, value))
    if isinstance(value, dict):
        items = [(_plain(key), _plain(item)) for key, item in value.items()]
        into = {} if kind is defaultdict else value
        into.clear()
        into.update(dict(items))
        return into
    return value
