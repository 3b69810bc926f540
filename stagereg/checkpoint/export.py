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
from stagereg.checkpoint.advice import causes
from stagereg.checkpoint.encoding import Leaf
from stagereg.checkpoint.manifest import new_token
from stagereg.checkpoint.opened import structure_of
from stagereg.checkpoint.rank_group import reason
from stagereg.checkpoint.reading import CheckpointFiles
from stagereg.checkpoint.storage.safetensors import DTYPES, METADATA, head
from stagereg.errors import CheckpointError
from stagereg.kernel.memory import view_of

__all__ = ["SUFFIXES", "export"]

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


def export(
    files: CheckpointFiles, parts: Mapping[str, Any], only: str | None, out: Path, replace: bool, step: int | None
) -> tuple[list[str], list[str]]:
    """Write what is in a checkpoint to a file.

    Args:
        files: of the checkpoint, whose content has been looked at.
        parts: the structures in it, by the names of the state that was saved.
        only: one of these names; its own names are then the names in the file. ``None`` for all.
        out: the path of the file; the suffix, one of :data:`SUFFIXES`, is its format.
        replace: whether it may take the place of a file that is there.
        step: of the checkpoint, for the head of a ``.safetensors``.

    Returns:
        Of the names of the state those that are in the file, and the names of what such a file cannot hold.

    Raises:
        CheckpointError: there is no such name, the file cannot hold a tensor, or it is there already. ``OSError``.
    """
    if only is not None:
        parts = {only: structure_of(parts, only, files.path)}
    if out.suffix != ".safetensors":
        files.read([leaf for structure in parts.values() for leaf in encoding.marks(structure)])
        state = {name: encoding.fill(structure) for name, structure in parts.items()}
        whole = state if only is None else state[only]
        _write_file(out, replace, lambda file: _write_pt(file, whole))
        return sorted(state), []
    tensors: dict[str, Leaf] = {}
    others: list[str] = []
    held: set[str] = set()
    for part, structure in parts.items():
        for name, leaf in encoding.leaves(structure, part):
            name = name if only is None else name.removeprefix(f"{only}.")
            if isinstance(leaf, Leaf) and leaf.stored.dtype is not None:
                tensors[name] = leaf
                held.add(part)
            else:
                others.append(name)
    _write_file(out, replace, lambda file: _write_tensors(file, files, tensors, step))
    return sorted(held), sorted(others)


def _write_tensors(file: IO[bytes], files: CheckpointFiles, tensors: Mapping[str, Leaf], step: int | None) -> None:
    kinds = {name: (leaf.stored.dtype, leaf.stored.shape) for name, leaf in tensors.items()}
    for name, (dtype, _) in kinds.items():
        if dtype not in DTYPES or name == METADATA:
            raise CheckpointError(f"safetensors cannot hold {name!r}, which is {dtype}; write a .pt")
    # As the library does it: by size of the elements, so that every tensor is aligned, and then by name.
    order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    file.write(head({name: kinds[name] for name in order}, {"format": "pt", "step": str(step)}))
    for leaf in map(tensors.__getitem__, order):
        files.read([leaf])
        if leaf.value.numel():
            file.write(view_of(leaf.value.contiguous()))
        leaf.value = None


def _write_pt(file: IO[bytes], state: Any) -> None:
    """Write what ``torch.load(weights_only=True)`` takes, which is tried. Raises: ``CheckpointError``, ``OSError``."""
    try:
        torch.save(state, file)
    except RuntimeError as error:  # of torch's archive, which could not be ended after what the file has raised
        raise next((each for each in causes(error) if isinstance(each, OSError)), error) from None
    file.flush()
    try:
        torch.load(str(file.name), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        text = f"torch.load(weights_only=True) would refuse it ({reason(error)}); a .safetensors has the tensors alone."
        raise CheckpointError(text) from error
