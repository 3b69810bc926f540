"""``.metadata`` of ``torch.distributed.checkpoint``: a pickle that may name the types of torch's metadata only.

torch unpickles this file, which may run code. Here any other name in it is refused, and nothing is imported.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.checkpoint.metadata as torch_metadata

from stagereg.checkpoint.format.manifest import METADATA, is_name
from stagereg.errors import CheckpointError

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


def loads(content: bytes) -> torch_metadata.Metadata:
    """Return the metadata in the content of the file. Raises: ``CheckpointError``, and what ``pickle`` raises."""
    metadata: torch_metadata.Metadata = _Unpickler(io.BytesIO(content)).load()
    return metadata


def file_sizes(content: bytes) -> dict[str, int]:
    """Return the size that each file must have at least, by its name. Raises: ``ValueError`` if that is unknown."""
    try:
        sizes: dict[str, int] = {}
        for info in loads(content).storage_data.values():
            name, end = info.relative_path, info.offset + info.length
            if not is_name(name) or "/" in name or name in (".", "..") or type(end) is not int:
                raise ValueError(f"it names {name!r:.100}, which is not a file of the directory")
            sizes[name] = max(end, sizes.get(name, 0))
        return sizes
    except Exception as error:  # of any class, since the file may hold anything
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[f"{module}.{name}"]
        except KeyError:
            text = f"its {METADATA} names {module[:100]}.{name[:100]}, which is no metadata; nothing was imported."
            raise CheckpointError(text) from None
