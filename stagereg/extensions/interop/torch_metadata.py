"""Read the pickle ``.metadata`` of ``torch.distributed.checkpoint`` without running code from it.

torch unpickles this file, which may run code. This module accepts only the types of torch's metadata, checks the type
of each value, and imports nothing. The pickle cannot modify these types.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.checkpoint.metadata as dcp
import torch.distributed.checkpoint.metadata as torch_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from stagereg.checkpoint.format.encoding import DEEPEST
from stagereg.checkpoint.format.index import MOST_DIMENSIONS
from stagereg.checkpoint.format.manifest import METADATA, MOST
from stagereg.checkpoint.format.unpickler import BoundedUnpickler, Name
from stagereg.errors import CheckpointError
from stagereg.kernel.copier import no_collection

_CHUNKS = 10_000  # maximum number of chunks without stored data
METADATA_BYTES = 1 << 30  # largest file that is read
_ENCODING = torch_metadata._MEM_FORMAT_ENCODING
_INFO = filesystem._StorageInfo
_OBJECTS: tuple[type, ...] = (Metadata, MetadataIndex, dcp.StorageMeta, dcp.TensorProperties, dcp.BytesStorageMetadata)
_OBJECTS += (ChunkStorageMetadata, TensorStorageMetadata, _INFO)
_DTYPES = {f"torch.{each}": dtype for each, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_MADE: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__name__}": partial(kind.__new__, kind) for kind in _OBJECTS},
    f"{_ENCODING.__module__}.{_ENCODING.__name__}": _ENCODING,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": lambda name: torch.strided,
    # Some Python versions pickle the member of an enum as getattr(enum, name).
    "builtins.getattr": lambda kind, name: _ENCODING.__members__[name],
    "pathlib.PosixPath": PosixPath,
    "pathlib._local.PosixPath": PosixPath,
}
_ARGUMENTS = (int, str, tuple, Name)
_PROPERTIES = (torch.dtype, torch.layout, bool, _ENCODING)


def loads(content: bytes) -> Metadata:
    """Return the metadata in the content of a ``.metadata`` file. Raises ``CheckpointError`` if it is invalid."""
    try:
        with no_collection():
            metadata = _MetadataUnpickler(content).load()
            _expect_sound(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # any error, since the file is untrusted
        text = f"the file {METADATA} is not valid torch metadata: {type(error).__name__}: {error!s:.200}"
        raise CheckpointError(text) from error
    return metadata


class _MetadataUnpickler(BoundedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _DTYPES:
            return _DTYPES[full]
        if full not in _MADE:
            text = f"{METADATA} names {module:.100}.{name:.100}, which is not torch metadata. Nothing was imported."
            raise CheckpointError(text)
        return Name(full)

    def call(self, of: Any, given: Any) -> Any:
        if type(of) is not Name or type(given) is not tuple:
            raise ValueError("the pickle calls an object that is not a type of torch metadata")
        for each in given:
            if type(each) not in _ARGUMENTS:
                raise ValueError("the pickle calls a type of torch metadata with an unsupported argument")
        return _MADE[of](*given)

    def build(self, made: Any, state: Any) -> None:
        if type(made) is dcp.TensorProperties:
            if type(state) is not tuple or any(type(each) not in _PROPERTIES for each in state):
                raise ValueError("the properties of a tensor have an unsupported type")
            made.__setstate__(state)
        elif type(made) in _OBJECTS and type(state) is dict:
            if type(made) is MetadataIndex:  # its fields must be valid before it is hashed as a key
                _expect(state.get("fqn"), str)
                if state.get("offset") is not None:
                    _expect_size(state["offset"])
            vars(made).update(state)
        else:
            raise ValueError("the pickle sets the state of an object that has no state")

    def make_tuple(self, items: list[Any]) -> Any:
        for item in items:
            if type(item) is tuple:
                self.gone_through(len(item))
                for each in item:
                    if type(each) is tuple:
                        raise ValueError("the pickle nests tuples deeper than torch metadata does")
        return tuple(items)

    def set_items(self, of: Any, items: list[Any]) -> None:
        if type(of) is not dict:
            raise ValueError("the pickle sets an item of an object that is not a dict")
        for key in items[::2]:
            self.gone_through(len(key) if type(key) is tuple else 0)
        of.update(zip(items[::2], items[1::2], strict=True))


def _expect_sound(metadata: Any) -> None:
    """Raise an exception if a value in the metadata does not have the type that torch writes."""
    _expect(metadata, Metadata)
    chunks_left = _CHUNKS + 8 * len(metadata.storage_data)
    for name, entry in _items(metadata.state_dict_metadata):
        _expect(name, str)
        if type(entry) is TensorStorageMetadata:
            _expect(entry.properties, dcp.TensorProperties)
            _expect(entry.properties.dtype, torch.dtype)
            _expect(entry.chunks, list)
            _expect_size(entry.size)
            chunks_left -= len(entry.chunks)
            if chunks_left < 0:
                raise ValueError("the tensors have many more chunks than stored data")
            for chunk in entry.chunks:
                _expect(chunk, ChunkStorageMetadata)
                _expect_size(chunk.offsets, len(entry.size))
                _expect_size(chunk.sizes, len(entry.size))
        else:
            _expect(entry, dcp.BytesStorageMetadata)
    for name, way in _items(metadata.planner_data or {}):
        _expect(name, str)
        _expect(way, tuple)
        keys = way[: DEEPEST + 1]
        if not way or type(way[0]) is not str or any(type(key) is not str and not _is_number(key) for key in keys):
            raise ValueError(f"the path of {name!r:.100} in the state is invalid")
    for index, info in _items(metadata.storage_data):
        _expect(index, MetadataIndex)
        _expect(info, _INFO)
        _expect(info.relative_path, str)
        if not _is_number(info.offset) or not _is_number(info.length):
            raise ValueError(f"the offset or length of {index.fqn!r:.100} in its file is invalid")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    _expect(value, dict)
    return value.items()


def _expect(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f"a value has the wrong type: expected {kind.__name__}, got {type(value).__name__}")


def _expect_size(value: Any, ndim: int | None = None) -> None:
    _expect(value, torch.Size)
    if len(value) > MOST_DIMENSIONS:
        raise ValueError("a tensor has more dimensions than are supported")
    if ndim not in (None, len(value)):
        raise ValueError("a chunk and its tensor have different numbers of dimensions")


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST
