"""A checkpoint as one file that needs no checkpointer: for ``torch.load``, or for whatever reads safetensors.

Read by one process without a process group, whatever number of ranks wrote it: sharded tensors become whole, the
shards of a ``ZeroRedundancyOptimizer`` the state dict of the optimizer inside. The file is written beside its final
name and flushed first, so it is complete or absent.

A ``.pt`` holds everything, and so does the memory of the process for a while. What ``torch.load(weights_only=True)``
would not take is there in plain: NumPy's numbers as Python's, a ``defaultdict`` as a ``dict``. A ``.safetensors`` holds
tensors only; it is written piece by piece, since its layout (huggingface.co/docs/safetensors, "Format") is known before
the first tensor is read. Tied tensors are in either of them once a name.
"""

from __future__ import annotations

import _codecs
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import stagereg.checkpoint.sources as sources
import stagereg.checkpoint.structure as structure
import stagereg.checkpoint.torchfiles as torchfiles
import stagereg.registry as registry
from stagereg.checkpoint.advice import causes
from stagereg.checkpoint.manifest import Checkpoint, new_token
from stagereg.checkpoint.rank_group import reason
from stagereg.checkpoint.storage.lookup import named
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, nearest

__all__ = ["SUFFIXES", "Export"]

SUFFIXES = (".pt", ".pth", ".safetensors")
"""What a file may be called."""
_PIECE_BYTES = 256 << 20
_ALIGNMENT = 8
_METADATA = "__metadata__"
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The names that safetensors has for dtypes."""


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the checkpoint: whose it is, what the file calls it, and, of a tensor, what it is like."""

    part: str
    name: str
    kind: torch.Tensor | None


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
        self._storage: Storage = named(checkpoint.manifest.storage, registry.build("storage", "dcp"))
        parts = sources.parts(self._storage, self._path, checkpoint.manifest.world_size)
        if only is not None and only not in parts:
            known = sources.listed(list(parts))
            raise CheckpointError(f"There is no {only!r} in {self._path}, only {known}.{nearest(only, parts)}")
        self._parts = parts if only is None else {only: parts[only]}
        self._leaves = dict(self._named_leaves())
        self.merged = [name for name, part in self._parts.items() if name not in part]

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return sum(leaf.kind is not None for leaf in self._leaves.values())

    def names(self, out: Path) -> list[str]:
        """Return of the names of the state those that are in ``out``; neither the step nor the generators are."""
        if out.suffix != ".safetensors":
            return sorted(self._parts)
        return sorted({leaf.part for leaf in self._leaves.values() if leaf.kind is not None})

    def needs(self, out: Path) -> int:
        """Return the bytes of tensors that are in memory at once while ``out`` is written."""
        sizes = [leaf.kind.nbytes for leaf in self._leaves.values() if leaf.kind is not None]
        if out.suffix == ".safetensors":
            return max(_PIECE_BYTES, max(sizes, default=0)) if sum(sizes) > _PIECE_BYTES else sum(sizes)
        return sum(sizes)

    def left_out(self, out: Path) -> list[str]:
        """Return the names of what ``out`` cannot hold."""
        if out.suffix != ".safetensors":
            return []
        return sorted(leaf.name for leaf in self._leaves.values() if leaf.kind is None)

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
            if replace:
                beside.replace(out)
            else:
                _take_name(beside, out)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def _named_leaves(self) -> Iterator[tuple[str, _Leaf]]:
        """What is read, by its dotted name in the checkpoint."""
        kinds = torchfiles.kinds(self._storage, self._path)
        for name, part in self._parts.items():
            for entry, shape in part.items():
                for leaf in structure.leaf_names(shape, entry):
                    own = leaf.removeprefix(entry)
                    yield leaf, _Leaf(name, (name + own if self._only is None else own[1:]) or name, kinds[leaf])

    def _write_all(self, file: IO[bytes]) -> None:
        read = {name: self._read(name, part) for name, part in self._parts.items()}
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

    def _read(self, name: str, part: Mapping[str, Any]) -> Any:
        return sources.read_part(self._storage, self._path, name, part)

    def _write_tensors(self, file: IO[bytes]) -> None:
        tensors = {leaf: (each.name, each.kind) for leaf, each in self._leaves.items() if each.kind is not None}
        # As the library does it: by size of the elements, so that every tensor is aligned, and then by name.
        order = sorted(tensors, key=lambda leaf: (-tensors[leaf][1].dtype.itemsize, tensors[leaf][0]))
        table: dict[str, Any] = {_METADATA: {"format": "pt", "step": str(self._step)}}
        end = 0
        for leaf in order:
            name, kind = tensors[leaf]
            begin, end = end, end + kind.nbytes
            if kind.dtype not in _DTYPES:
                raise CheckpointError(f"safetensors cannot hold {name!r}, which is {kind.dtype}; write a .pt")
            if name == _METADATA:
                raise CheckpointError(f"safetensors cannot hold a tensor called {name!r}; write a .pt")
            table[name] = {"dtype": _DTYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": [begin, end]}
        head = json.dumps(table, separators=(",", ":")).encode()
        head += b" " * (-len(head) % _ALIGNMENT)
        file.write(len(head).to_bytes(8, "little") + head)
        for piece in _pieces(order, {leaf: kind.nbytes for leaf, (_, kind) in tensors.items()}):
            values = torchfiles.read_leaves(self._storage, self._path, piece)
            for leaf in piece:
                file.write(_content(values.pop(leaf)))


def _pieces(leaves: list[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Parts of a list of tensors that are read at once."""
    piece: list[str] = []
    nbytes = 0
    for leaf in leaves:
        if piece and nbytes + sizes[leaf] > _PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
        piece.append(leaf)
        nbytes += sizes[leaf]
    if piece:
        yield piece


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


def _content(x: torch.Tensor) -> memoryview:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _take_name(beside: Path, out: Path) -> None:
    """Give a file its name unless there is one of that name. Raises: ``CheckpointError`` if there is."""
    try:
        os.link(beside, out)
    except FileExistsError:
        raise CheckpointError(f"{out} is there already; --force replaces it.") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(out):
            raise CheckpointError(f"{out} is there already; --force replaces it.") from None
        beside.rename(out)
