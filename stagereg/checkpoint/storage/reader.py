"""Reads torch's files without trusting them: checks the metadata, and the files against the metadata.

Torch's ``FileSystemReader`` unpickles ``.metadata`` and opens what that names. :class:`CheckpointReader` reads it with
:mod:`stagereg.checkpoint.trusted` and builds torch's own objects from it one field at a time. Before anything else is
opened, and before there is memory for anything, it is certain that

* every file that is named lies in the directory, is a regular file, and is in the manifest, where there is one;
* everything lies within its file, and no tensor is larger than what is stored of it.

A tensor is then read with ``torch.load(weights_only=True)``, as torch does, from an archive that has been looked at
(:mod:`.archive`). What is asked for twice may be stored once: the names of a file can ask for more memory together than
the file has bytes.
"""

from __future__ import annotations

import math
import os
import pickle
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from stagereg.checkpoint.manifest import MANIFEST, MOST, Manifest
from stagereg.checkpoint.storage.archive import expect_stored
from stagereg.checkpoint.trusted import Maker, Record, Vocabulary, dtypes, exactly, loads
from stagereg.errors import CheckpointError

__all__ = ["CheckpointReader", "read_metadata"]

C = TypeVar("C", bound=Collection[Any])

_METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_ENCODING = f"{_TORCH}_MEM_FORMAT_ENCODING"
_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62
_LONGEST_PATH = 1 << 16
_TYPES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def read_metadata(data: bytes) -> Metadata:
    """Return the content of a ``.metadata`` file, in torch's own objects.

    Raises:
        CheckpointError: it is damaged, or has something else in it than metadata; nothing of it was run.
    """
    record = loads(data, _VOCABULARY)
    try:
        return _metadata(record, _Quota(len(data)))
    except (TypeError, KeyError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"it is no metadata of a checkpoint: {error}") from error


class CheckpointReader(FileSystemReader):
    """Reads what torch's ``FileSystemWriter`` and the storages of the project wrote in the directory ``path``.

    :meth:`read_metadata`, :meth:`read_data` and torch's other methods as ``torch.distributed.checkpoint.load`` calls
    them. A checkpoint that is not what it should be is a ``CheckpointError``.
    """

    _read: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, in the directory ``checkpoint_id`` if one is given."""
        super().reset(checkpoint_id)
        self._read = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check ``.metadata``. Raises: ``CheckpointError``; ``OSError`` for a file that cannot be read."""
        name = _METADATA if kwargs.get("rank") is None else f"__{kwargs['rank']}{_METADATA}"
        if self._read is not None:
            return self._read
        try:
            metadata = read_metadata(self._content(name))
            _check(metadata, self._sizes({info.relative_path for info in metadata.storage_data.values()}))
        except CheckpointError as error:
            raise CheckpointError(f"{name} of {self.path} was refused: {error}.") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._read = metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan, in the order in which they lie in their files."""
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self.expect_regular(name)
        items = sorted(plan.items, key=lambda item: int(self.storage_data[item.storage_index].offset))
        try:
            return super().read_data(replace(plan, items=items), planner)
        except pickle.UnpicklingError as error:  # torch's message explains how to run the pickle
            raise CheckpointError(f"{self.path} has something else where a tensor belongs; nothing was run") from error

    def expect_regular(self, name: str) -> None:
        """Raise ``CheckpointError`` unless a file of the directory is a regular one; never opens it, so never waits."""
        # Only a local file system has other files; what leads out of the directory or never ends is not opened.
        if isinstance(self.path, Path) and not stat.S_ISREG(os.lstat(self.path / name).st_mode):
            raise CheckpointError(f"{name} of {self.path} is no regular file")

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        part: IO[bytes] = super()._slice_file(file, sinfo)
        try:
            expect_stored(part)
        except CheckpointError as error:
            raise CheckpointError(f"{sinfo.relative_path} of {self.path}, byte {sinfo.offset}: {error}.") from error
        return part

    def _content(self, name: str) -> bytes:
        self.expect_regular(name)
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            data: bytes = stream.read()
        return data

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of files by name; a file that is not in the manifest is not looked at."""
        for name in names:
            _expect_plain(name)
        if self.fs.exists(self.fs.concat_path(self.path, MANIFEST)):
            try:
                return {name: mark.bytes for name, mark in Manifest.loads(self._content(MANIFEST)).files.items()}
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"its {MANIFEST} is damaged ({error})") from error
        return {name: self._size(name) for name in names}

    def _size(self, name: str) -> int:
        self.expect_regular(name)
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            stream.seek(0, os.SEEK_END)
            return stream.tell()


def _expect_plain(name: str) -> None:
    if not name.isprintable() or name in ("", ".", "..") or set(name) & set("/\\"):
        raise CheckpointError(f"it names {name[:200]!r}, which is no file of its directory")


def _check(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Check where every entry lies, and how large it is, against the sizes of the files."""
    for info in metadata.storage_data.values():
        if info.relative_path not in sizes:
            raise CheckpointError(f"it names {info.relative_path!r:.100}, which is no file of the checkpoint")
        if info.offset + info.length > sizes[info.relative_path]:
            raise CheckpointError(
                f"it names bytes {info.offset} to {info.offset + info.length} of {info.relative_path}, which has "
                f"{sizes[info.relative_path]}"
            )
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, metadata.storage_data)
        elif MetadataIndex(name) not in metadata.storage_data:
            raise CheckpointError(f"it has {name!r:.100} without saying where")


def _check_tensor(name: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, _StorageInfo]) -> None:
    elements = 0
    for chunk in entry.chunks:
        info = stored.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise CheckpointError(f"it has a part of {name!r:.100} without saying where")
        count = math.prod(chunk.sizes)
        within = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and all(
            not count or begin + length <= whole
            for begin, length, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
        if not within or count * entry.properties.dtype.itemsize > info.length:
            raise CheckpointError(f"it has a part of {name!r:.100} that is larger than what is stored of it")
        elements += count
    if elements < math.prod(entry.size):
        whole = math.prod(entry.size)
        raise CheckpointError(f"it has {name!r:.100} with {whole} elements, and {elements} of them stored")


# -- from records to torch's objects


def _size(sizes: Any) -> torch.Size:
    numbers = exactly(tuple, sizes)
    if len(numbers) > _MOST_DIMENSIONS or any(type(n) is not int or not 0 <= n < _MOST_ELEMENTS for n in numbers):
        raise ValueError("there is no size of a tensor where one belongs")
    if math.prod(max(n, 1) for n in numbers) > _MOST_ELEMENTS:
        raise ValueError("there is a size with more elements than memory has addresses")
    return torch.Size(numbers)


def _layout(name: str) -> torch.layout:
    if exactly(str, name) != "torch.strided":
        raise ValueError(f"a tensor is {name!r:.50}, which checkpoints of torch do not hold")
    return torch.strided


def _path(*parts: str) -> str:
    if sum(len(exactly(str, part)) + 1 for part in parts) > _LONGEST_PATH:
        raise ValueError("there is a path longer than any")
    return os.sep.join(parts).replace(2 * os.sep, os.sep)


def _memory_format(cls: Maker, name: str) -> Record:
    """For ``getattr``, with which some Python 3.11 pickle the member of an enumeration; nothing else is asked so."""
    if exactly(Maker, cls).path != _ENCODING:
        raise ValueError(f"it asks for the attribute {name!r:.50} of something")
    return Record(_ENCODING, (_FORMAT_NAMES.index(name),))


_VOCABULARY = Vocabulary(
    {
        **{_TORCH + name: Record.maker(_TORCH + name) for name in _TYPES},
        _STORAGE_INFO: Record.maker(_STORAGE_INFO),
        "torch.Size": Maker("torch.Size", _size),
        "torch.serialization._get_layout": Maker("torch.serialization._get_layout", _layout),
        **{
            f"{module}.{name}": Maker(name, _path)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        },
        "builtins.getattr": Maker("builtins.getattr", _memory_format),
        **dtypes(),
    }
)


def _fields(record: Any, path: str) -> dict[str, Any]:
    if type(record) is not Record or record.path != path or record.args:
        raise TypeError(f"there is something else where a {path.rpartition('.')[2]} belongs")
    return exactly(dict, {} if record.state is None else record.state)


def _whole(number: Any) -> int:
    if not 0 <= exactly(int, number) <= MOST:
        raise ValueError("there is no number of bytes where one belongs")
    return int(number)


def _text(value: Any) -> str | None:
    return None if value is None else exactly(str, value)


class _Quota:
    """How many items there may be: each takes a byte, unless the file has one list stand for many, to fill memory."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, items: C) -> C:
        """Return ``items``. Raises: ``ValueError`` if there are too many in all."""
        self.left -= len(items)
        if self.left < 0:
            raise ValueError("it has more parts than bytes")
        return items


def _metadata(record: Any, quota: _Quota) -> Metadata:
    fields = _fields(record, f"{_TORCH}Metadata")
    return Metadata(
        state_dict_metadata={
            exactly(str, name): _entry(entry, quota)
            for name, entry in exactly(dict, fields["state_dict_metadata"]).items()
        },
        planner_data={
            exactly(str, name): _keys(quota.take(exactly(tuple, keys)))
            for name, keys in exactly(dict, fields.get("planner_data") or {}).items()
        },
        storage_data={_index(index): _info(info) for index, info in exactly(dict, fields["storage_data"]).items()},
        storage_meta=_storage_meta(fields.get("storage_meta")),
        version=_text(fields.get("version")),
    )


def _entry(record: Any, quota: _Quota) -> BytesStorageMetadata | TensorStorageMetadata:
    if type(record) is Record and record.path == f"{_TORCH}BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, f"{_TORCH}TensorStorageMetadata")
    return TensorStorageMetadata(
        properties=_properties(fields["properties"]),
        size=exactly(torch.Size, fields["size"]),
        chunks=[_chunk(chunk) for chunk in quota.take(exactly(list, fields["chunks"]))],
    )


def _properties(record: Any) -> TensorProperties:
    path = f"{_TORCH}TensorProperties"
    if type(record) is not Record or record.path != path:
        raise TypeError("there is something else where a TensorProperties belongs")
    dtype, layout, requires_grad, memory_format, pin_memory = exactly(tuple, record.state)
    if type(memory_format) is not Record or memory_format.path != _ENCODING:
        raise TypeError("there is something else where a memory format belongs")
    (encoded,) = memory_format.args
    return TensorProperties(
        dtype=exactly(torch.dtype, dtype),
        layout=exactly(torch.layout, layout),
        requires_grad=exactly(bool, requires_grad),
        memory_format=_MEMORY_FORMATS[_whole(encoded)],
        pin_memory=exactly(bool, pin_memory),
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, f"{_TORCH}ChunkStorageMetadata")
    return ChunkStorageMetadata(
        offsets=exactly(torch.Size, fields["offsets"]), sizes=exactly(torch.Size, fields["sizes"])
    )


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, f"{_TORCH}MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        exactly(str, fields["fqn"]),
        None if offset is None else exactly(torch.Size, offset),
        None if index is None else _whole(index),
    )


def _info(record: Any) -> _StorageInfo:
    fields = _fields(record, _STORAGE_INFO)
    if fields.get("transform_descriptors"):
        raise ValueError("something is stored through an extension of torch's format, which is not read here")
    return _StorageInfo(exactly(str, fields["relative_path"]), _whole(fields["offset"]), _whole(fields["length"]))


def _storage_meta(record: Any) -> StorageMeta | None:
    if record is None:
        return None
    fields = _fields(record, f"{_TORCH}StorageMeta")
    return StorageMeta(checkpoint_id=_text(fields.get("checkpoint_id")), save_id=_text(fields.get("save_id")))


def _keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where in the state an entry was: text and numbers."""
    if any(type(key) not in (str, int) for key in keys):
        raise TypeError("there is something else than text and numbers on the way to an entry")
    return keys
