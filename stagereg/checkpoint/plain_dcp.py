"""Directories that plain ``torch.distributed.checkpoint.save`` wrote, for ``stagereg convert`` alone.

torch reads ``.metadata`` and all values with ``pickle``, which runs whatever they name. Here ``.metadata`` may name the
types of torch's metadata and nothing else, and values are read as in checkpoints of this project
(:mod:`stagereg.checkpoint.pickled`). As torch reads them, integer keys have become text, and empty containers are gone.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint._traverse import set_element

import stagereg.checkpoint.pickled as pickled
from stagereg.checkpoint.index import overlap
from stagereg.checkpoint.manifest import MANIFEST
from stagereg.errors import CheckpointError

__all__ = ["is_plain_dcp", "read_plain_dcp"]

_METADATA = ".metadata"
_ENCODING = torch_metadata._MEM_FORMAT_ENCODING
_TYPES = (
    torch_metadata.Metadata,
    torch_metadata.MetadataIndex,
    torch_metadata.StorageMeta,
    torch_metadata.TensorProperties,
    torch_metadata.BytesStorageMetadata,
    torch_metadata.ChunkStorageMetadata,
    torch_metadata.TensorStorageMetadata,
    _ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)
_KNOWN: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__name__}": kind for kind in _TYPES},
    **{f"torch.{each}": dtype for each, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    "torch.serialization._get_layout": lambda name: torch.strided,
    # Some Pythons pickle the member of an enumeration as getattr(kind, name).
    "builtins.getattr": lambda kind, name: _ENCODING.__members__[name],
    "pathlib.PosixPath": PosixPath,
    "pathlib._local.PosixPath": PosixPath,
}


def is_plain_dcp(path: str) -> bool:
    """Whether it is a local directory that plain torch wrote, and not a checkpoint of this project."""
    folder = Path(path).expanduser()
    return (folder / _METADATA).is_file() and not (folder / MANIFEST).exists()


def read_plain_dcp(path: str) -> dict[str, Any]:
    """Return the state dict in a directory, in memory. Tensors are whole; each is a CPU tensor of its saved dtype.

    Raises:
        CheckpointError: it is damaged, or names something else than data; nothing of it was run.
    """
    folder = Path(path).expanduser()
    state: dict[str, Any] = {}
    try:
        with (folder / _METADATA).open("rb") as file:
            metadata: torch_metadata.Metadata = _Unpickler(file).load()
        paths = metadata.planner_data or {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, torch_metadata.TensorStorageMetadata):
                value = _tensor(folder, name, entry, metadata.storage_data)
            else:
                value = _value(folder, name, metadata.storage_data[torch_metadata.MetadataIndex(name)])
            set_element(state, paths.get(name, (name,)), value)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} was not read: {type(error).__name__}: {str(error)[:300]}") from error
    return state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[f"{module}.{name}"]
        except KeyError:
            text = f"its {_METADATA} names {module[:100]}.{name[:100]}, which is no metadata; nothing was imported."
            raise CheckpointError(text) from None


def _tensor(folder: Path, name: str, entry: torch_metadata.TensorStorageMetadata, places: Any) -> torch.Tensor:
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel() or (len(boxes) > 1 and overlap(boxes)):
        raise CheckpointError(f"the parts of {name!r:.100} are not the whole of it.")
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        part = _value(folder, name, places[torch_metadata.MetadataIndex(name, chunk.offsets)])
        if not isinstance(part, torch.Tensor) or (part.shape, part.dtype) != (chunk.sizes, whole.dtype):
            raise CheckpointError(f"{name!r:.100} has another shape or dtype than its {_METADATA} says.")
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = part.detach()
    return whole


def _value(folder: Path, name: str, info: Any) -> Any:
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError(f"it names {info.relative_path[:100]!r}, which is no file of the directory.")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError("it is stored through an extension of torch's format, which is not read here.")
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return pickled.load(name, file.read(info.length))
