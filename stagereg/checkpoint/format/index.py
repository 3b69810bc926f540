"""The index of a checkpoint, a JSON file with the location of every tensor's bytes and the structure of the state.

Another program needs only ``index.json`` to read the files of a checkpoint (docs/format.md). Rank 0 writes the index
(:func:`make_index`). :meth:`Index.loads` validates every number in the index, for example against the sizes of the
files, before any file is opened or any memory is allocated.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.base.option_text import choice
from stagereg.checkpoint.format.encoding import Encoded, decode, marks
from stagereg.checkpoint.format.manifest import MOST
from stagereg.errors import CheckpointError
from stagereg.kernel.copier import no_collection

INDEX = "index.json"
INDEX_BYTES = 1 << 30  # size of the largest index that is read; each tensor takes less than a hundred bytes
_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES = {name: value for value, name in _NAMES.items() if not name.startswith("q")}  # quantized dtypes are not saved
ARCHIVE = "archive"  # layout of a chunk that ``torch.save`` has written
SUBCLASS = "subclass"  # layout of a chunk in which ``torch.save`` has written a tensor that wraps others
_FORMAT = 1
MOST_DIMENSIONS = 64
_SHORT = 1 << 20  # longest structure, in characters, that is validated again after a change
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape


@dataclass(frozen=True)
class TensorResult(WriteResult):
    """The result of ``write_data`` for a tensor. Unlike torch's ``WriteResult``, it has the offset of the bytes.

    ``content``: the offset of the shard's first element in the file ``storage_data.relative_path``. The other elements
    follow without gaps. ``stride``: the strides of the elements, as in ``Tensor.stride``; None for row-major order.
    """

    content: int
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ArchiveResult(WriteResult):
    """The result of ``write_data`` for an item that ``torch.save`` has written. ``storage_data`` is its location."""


class Chunk(NamedTuple):
    """A shard of a tensor in a file."""

    file: str  # name of the file in the checkpoint directory
    offset: int  # offset of the first byte in the file
    length: int  # number of bytes
    start: tuple[int, ...]  # offset of the shard in each dimension of the whole tensor
    shape: tuple[int, ...]  # shape of the shard
    # ``None`` for elements in row-major order; the strides, in elements, for another order without gaps;
    # ``"archive"`` or ``"subclass"`` for a ``torch.save`` archive
    layout: tuple[int, ...] | str | None


class Stored(NamedTuple):
    """The location of a tensor or an object in a checkpoint."""

    dtype: torch.dtype | None  # dtype of the tensor; ``None`` for an object
    shape: torch.Size  # shape of the whole tensor
    # the shards, which cover a tensor exactly once; or an object's only chunk; ``None`` if only the storage can read it
    chunks: tuple[Chunk, ...] | None

    @property
    def is_subclass(self) -> bool:
        """Whether a shard wraps other tensors. Such a tensor is read in the form in which it was saved."""
        return any(chunk.layout == SUBCLASS for chunk in self.chunks or ())


class Index:
    """The validated index of a checkpoint. The constructor raises an exception of any class if the content is invalid.

    ``content``: the parsed ``index.json``. ``sizes``: the sizes of the checkpoint's files in bytes, by name, from the
    manifest. ``state``: the structure of each entry, for :func:`.encoding.decode`.
    """

    def __init__(self, content: Any, sizes: Mapping[str, int]) -> None:
        _check(content, sizes)
        self._files: list[str] = content["files"]
        self._tensors: dict[str, Any] = content["tensors"]
        self._objects: dict[str, Any] = content["objects"]
        self.state: dict[str, Any] = content["state"]

    @classmethod
    @no_collection()
    def loads(cls, data: bytes | bytearray, sizes: Mapping[str, int]) -> Index:
        """Parse and validate ``index.json``. Raises: ``CheckpointError`` if it is invalid."""
        try:
            return cls(json.loads(data), sizes)
        except RecursionError:
            raise CheckpointError(f"{INDEX} is invalid: it is nested too deeply.") from None
        except Exception as error:
            raise CheckpointError(f"{INDEX} is invalid: {str(error)[:300]}.") from error

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor or object of that name."""
        return name in self._tensors or name in self._objects

    def find(self, name: str) -> Stored | None:
        """Return the location of a tensor or object; ``None`` if the name does not exist."""
        if name in self._tensors:
            dtype, shape, chunks = self._tensors[name]
            if chunks is not None:
                chunks = tuple(self._chunk(chunk, shape) for chunk in chunks)
            return Stored(DTYPES[dtype], torch.Size(shape), chunks)
        if name not in self._objects:
            return None
        place = self._objects[name]
        return Stored(None, torch.Size(), None if place is None else (self._chunk([*place, [], [], ARCHIVE], []),))

    def _chunk(self, chunk: list[Any], whole: list[int]) -> Chunk:
        file, offset, length, *part = chunk
        return Chunk(self._files[file], offset, length, *_part(whole, part))


def _part(whole: list[int], part: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """Return the start, shape and layout of a chunk. A chunk without them in the index is a whole tensor."""
    start, shape, layout = (*part, None)[:3] if part else ([0] * len(whole), whole, None)
    return tuple(start), tuple(shape), tuple(layout) if type(layout) is list else layout


# -- writing


def make_index(tensors: str, state: Mapping[str, Encoded]) -> bytes:
    """Return ``index.json``. ``tensors``: :func:`tables` as JSON. Raises: ``CheckpointError`` if it is too large."""
    texts = ",\n".join(f"{json.dumps(name)}: {encoded.text}" for name, encoded in state.items())
    data = f'{tensors[:-1]},\n"state": {{\n{texts}\n}}}}\n'.encode()
    if len(data) > INDEX_BYTES:
        largest = max(state, key=lambda name: len(state[name].text))
        raise CheckpointError(
            f"{INDEX} would be too large: it has {len(data):,} bytes, and at most {INDEX_BYTES:,} are read back. The "
            f"largest entry is {largest!r:.100}, with {len(state[largest].text):,} bytes. Save large values as tensors."
        )
    return data


class Readable(NamedTuple):
    """The validated content of an index, as JSON strings: the tables, and the structure of each entry."""

    tables: str = ""
    state: Mapping[str, str] = {}


@no_collection()
def expect_readable(
    index: bytes, tables: str, state: Mapping[str, Encoded], sizes: Mapping[str, int], before: Readable
) -> Readable:
    """Validate an index before its commit, and return its content. Raises: ``CheckpointError`` if it is invalid.

    ``before``: the content of the last index. If the tables are unchanged, only changed short structures are
    validated: for 100,000 tensors, a complete validation takes one or two seconds on the background thread.
    """
    found = Index.loads(index, sizes) if tables != before.tables else None
    for name, encoded in state.items():
        known = before.state.get(name) if found is None else None
        if known == encoded.text or (known is not None and len(encoded.text) > _SHORT):
            continue
        for leaf in marks(decode(json.loads(encoded.text), name)):
            if found is not None and leaf.name not in found:
                raise CheckpointError(f"{INDEX} has no location for {leaf.name!r:.100}.")
    return Readable(tables, {name: encoded.text for name, encoded in state.items()})


@no_collection()
def tables(metadata: Metadata, results: Iterable[Iterable[WriteResult]], objects: Container[str]) -> dict[str, Any]:
    """Build the tables of ``index.json`` from torch's metadata and the results of each rank's ``write_data``.

    ``objects``: the names of objects and wrapper tensors. Raises: ``CheckpointError`` if a result is missing.
    """
    files: dict[str, int] = {}

    def place(result: WriteResult, offset: int, length: int) -> list[Any]:
        return [files.setdefault(result.storage_data.relative_path, len(files)), offset, length]

    def archive(result: WriteResult) -> list[Any] | None:
        info = result.storage_data
        return place(result, info.offset, info.length) if isinstance(result, ArchiveResult) else None

    def chunk(name: str, entry: TensorStorageMetadata, part: ChunkStorageMetadata) -> list[Any] | None:
        box, result = [[*part.offsets], [*part.sizes]], written(name, part.offsets)
        if not isinstance(result, TensorResult):
            if (found := archive(result)) is None and name in objects:
                use = choice("storage", "dcp")
                text = f"{name!r} wraps other tensors, and this storage cannot save it in that form. Use {use}."
                raise CheckpointError(text)
            return None if found is None else [*found, *box, SUBCLASS if name in objects else ARCHIVE]
        found = place(result, result.content, part.sizes.numel() * entry.properties.dtype.itemsize)
        if result.stride is not None:
            return [*found, *box, [*result.stride]]
        return found if part.sizes == entry.size else [*found, *box]

    def written(name: str, offset: torch.Size | None) -> WriteResult:
        if (name, offset) not in by_place:
            at = f" at offset {[*offset]}" if offset and any(offset) else ""
            raise CheckpointError(f"write_data of the storage returned no result for {name!r}{at}.")
        return by_place[name, offset]

    by_place = {(result.index.fqn, result.index.offset): result for rank in results for result in rank}
    tensors: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [chunk(name, entry, part) for part in entry.chunks if part.sizes.numel()]
            tensors[name] = [_NAMES[entry.properties.dtype], [*entry.size], None if None in chunks else chunks]
        elif name in objects:
            found[name] = archive(written(name, None))
    return {"format": _FORMAT, "files": [*files], "tensors": tensors, "objects": found}


# -- checking


def _check(data: Any, sizes: Mapping[str, int]) -> None:
    if type(data) is not dict or data.get("format") != _FORMAT:
        raise ValueError(f"the format of the index is not {_FORMAT}")
    files, tensors, objects = data["files"], data["tensors"], data["objects"]
    if type(files) is not list or any(type(kind) is not dict for kind in (tensors, objects, data["state"])):
        raise TypeError("a section of the index has the wrong type")
    for name in files:
        if name not in sizes:
            raise ValueError(f"the index refers to the file {name!r:.100}, which is not in the manifest")
    extents: list[Any] = []
    for name, (dtype, shape, chunks) in tensors.items():
        itemsize = DTYPES[dtype].itemsize
        elements = _elements(shape)
        if chunks is None:
            continue
        if len(chunks) == 1 and len(chunks[0]) == 3:
            if chunks[0][2] != elements * itemsize:
                raise ValueError(f"the stored size of {name!r:.100} does not match its shape and dtype")
        else:
            _check_chunks(name, shape, elements, chunks, itemsize)
        extents += [tuple(chunk[:3]) for chunk in chunks]
    extents += [tuple(place) for place in objects.values() if place is not None]
    _check_extents(extents, [sizes[name] for name in files])


def _elements(shape: Any) -> int:
    if type(shape) is not list or len(shape) > MOST_DIMENSIONS:
        raise ValueError("a tensor has an invalid shape")
    elements = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MOST:
            raise ValueError(f"invalid size: {size!r:.50}")
        elements *= size
    if math.prod(size or 1 for size in shape) > MOST:
        raise ValueError("a tensor has more elements than memory can address")
    return elements


def _check_chunks(name: str, whole: list[int], elements: int, chunks: list[Any], itemsize: int) -> None:
    """Check that the chunks are inside their tensor, and cover each of its elements exactly once."""
    boxes: list[_Box] = []
    for _, _, length, *part in chunks:
        start, shape, layout = _part(whole, part)
        nbytes = _elements([*shape]) * itemsize
        if nbytes != length and not (layout == ARCHIVE and 0 < nbytes < length) and layout != SUBCLASS:
            raise ValueError(f"the stored size of a chunk of {name!r:.100} does not match its shape and dtype")
        for begin, size, limit in zip(start, shape, whole, strict=True):
            if type(begin) is not int or not 0 <= begin <= limit - size:
                raise ValueError(f"a chunk of {name!r:.100} is outside of the tensor")
        if layout not in (None, ARCHIVE, SUBCLASS):
            expect_strides(shape, layout)
        boxes.append((start, shape))
    if sum(math.prod(shape) for _, shape in boxes) != elements or (len(boxes) > 1 and overlap(boxes)):
        raise ValueError(f"the chunks of {name!r:.100} overlap or leave gaps")


def expect_strides(shape: Sequence[int], strides: Any) -> None:
    """Raise ``ValueError`` if the strides do not match the shape, leave gaps, or make elements overlap."""
    expected = 1
    if len(strides) != len(shape) or any(type(each) is not int or not 0 <= each <= MOST for each in strides):
        raise ValueError("a chunk has invalid strides")
    for stride, size in sorted(pair for pair in zip(strides, shape, strict=True) if pair[1] > 1):
        if stride != expected:
            raise ValueError("the elements of a chunk overlap or leave gaps")
        expected *= size


def overlap(boxes: list[_Box]) -> bool:
    """Return whether any two boxes overlap. Sweeps along the dimension with the most distinct starts."""
    along = max(range(len(boxes[0][0])), key=lambda i: len({start[i] for start, _ in boxes}), default=None)
    if along is None:
        return True
    active: list[_Box] = []
    for start, shape in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > start[along]]
        for begin, sizes in active:
            if all(a < b + m and b < a + n for a, n, b, m in zip(start, shape, begin, sizes, strict=True)):
                return True
        active.append((start, shape))
    return False


def _check_extents(extents: list[Any], ends: list[int]) -> None:
    """Check that the byte ranges are inside their files and do not overlap. Tied tensors may share a range."""
    for file, offset, length in extents:
        if type(file) is not int or type(offset) is not int or type(length) is not int:
            raise TypeError("a file number, offset or length is not an integer")
        if file < 0 or offset < 0 or length < 0 or offset + length > ends[file]:
            raise ValueError(f"bytes {offset} to {offset + length} are outside of their file")
    extents.sort()
    for one, other in itertools.pairwise(extents):
        if one != other and one[0] == other[0] and one[1] + one[2] > other[1]:
            raise ValueError(f"the data at byte {one[1]} of a file overlaps the data at byte {other[1]}")
