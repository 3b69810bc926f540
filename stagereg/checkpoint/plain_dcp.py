"""Directories that plain ``torch.distributed.checkpoint.save`` wrote, for ``stagereg convert`` alone.

torch reads ``.metadata`` and all values with ``pickle``, which runs whatever they name. Here ``.metadata`` may name the
types of torch's metadata and nothing else, and values are read as in checkpoints of this project
(:mod:`stagereg.checkpoint.pickled`); the rest is torch's own loader. As there, integer keys have become text, and empty
containers are gone.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PosixPath, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.futures import Future

import stagereg.checkpoint.pickled as pickled
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
    state: dict[str, Any] = {}
    try:
        reader = _Reader(Path(path).expanduser())
        _load_state_dict(state, storage_reader=reader, planner=_DataPlanner(), no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        inner = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if isinstance(inner, CheckpointError) or not isinstance(inner, Exception):
            raise inner from None
        raise CheckpointError(f"{path} was not read: {type(inner).__name__}: {str(inner)[:300]}") from error
    return state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[f"{module}.{name}"]
        except KeyError:
            text = f"its {_METADATA} names {module[:100]}.{name[:100]}, which is no metadata; nothing was imported."
            raise CheckpointError(text) from None


class _Reader(filesystem.FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with open(folder / _METADATA, "rb") as file:
            self._metadata: torch_metadata.Metadata = _Unpickler(file).load()
        for info in self._metadata.storage_data.values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"it names {info.relative_path[:100]!r}, which is no file of the directory.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> torch_metadata.Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError("it is stored through an extension of torch's format, which is not read here.")
            with open(Path(self.path) / info.relative_path, "rb") as file:
                file.seek(info.offset)
                value = pickled.load(item.storage_index.fqn, file.read(info.length))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, value)
                continue
            target = planner.resolve_tensor(item).detach()
            part = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise CheckpointError(f"{item.storage_index.fqn!r:.100} has another shape than its {_METADATA} says.")
            planner.commit_tensor(item, target.copy_(part))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _DataPlanner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], value)
