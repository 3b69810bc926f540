"""Reads a checkpoint: a few threads read bytes from its files directly into the memory of the tensors.

:class:`CheckpointFiles` has the validated index of one checkpoint (:mod:`.index`), and its files. The stored shards of
a tensor are intersected with the shard of this rank, so a checkpoint can be read at any world size. If the storage of
another package reports no offsets, its own reader and torch's planner read the values.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate

import stagereg.checkpoint.format.encoding as encoding
import stagereg.checkpoint.format.pickled as pickled
import stagereg.checkpoint.format.split_tensors as split_tensors
import stagereg.checkpoint.storage.subclasses as subclasses
from stagereg.base.small_files import UnfitFileError
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.encoding import PLAIN, REPLICATED, Leaf
from stagereg.checkpoint.format.index import ARCHIVE, INDEX, INDEX_BYTES, Chunk, Index, Stored
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.format.wrappers import is_plain_memory, name_of, wraps
from stagereg.checkpoint.state.name_map import NameMap
from stagereg.checkpoint.state.optimizer_state import ParameterNames
from stagereg.checkpoint.storage.protocol import Storage, is_builtin, named
from stagereg.checkpoint.storage.storage_reader import read_through
from stagereg.checkpoint.storage.subclasses import Whole
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.errors import CheckpointError
from stagereg.kernel.copier import no_collection

_THREADS = min(4, os.cpu_count() or 1)
_SMALL_BYTES = 1 << 16  # smaller ranges are read together with their neighbours
_RUN_BYTES = 1 << 20  # maximum bytes of a joint read of small ranges
_PIECE_BYTES = 1 << 23  # maximum bytes of a read into a tensor


class CheckpointFiles(ExitStack):
    """The index and the files of one checkpoint; a context manager that closes the files. Not thread-safe.

    ``storage`` wrote the checkpoint, and reads the values whose offsets are not in the index.
    """

    def __init__(self, path: str, index: Index, storage: Storage | None = None) -> None:
        super().__init__()
        self.path, self.index, self._storage = path, index, storage
        self._files: dict[str, File] = {}
        self._saved_names: Mapping[str, str] = {}  # the saved name of each entry, by its name in the state

    @classmethod
    def of(cls, checkpoint: Checkpoint, own: Storage, index: bytes | None = None) -> CheckpointFiles:
        """Open a complete checkpoint, with the storage ``own`` or a storage built by name.

        ``index``: its content, if it was read before. Raises: ``CheckpointError`` if the index is invalid; ``OSError``.
        """
        path, marks = checkpoint.path, checkpoint.manifest.files
        storage = named(checkpoint.manifest.storage, own)
        data = read_index(checkpoint) if index is None else index
        try:
            return cls(path, Index.loads(data, {name: mark.bytes for name, mark in marks.items()}), storage)
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def match(self, state: Mapping[str, Any], names: ParameterNames, name_map: NameMap) -> None:
        """Rename the saved entries with ``name_map``. Raises: ``CheckpointError`` if two entries get the same name."""
        self._saved_names = name_map.rename_entries(self.index.state, state)
        self.index.state = {here: self.index.state[saved] for here, saved in self._saved_names.items()}

    @no_collection()
    def structure(self, name: str, rank: int | None = None) -> Any:
        """Return the structure of one entry, with a :class:`.Leaf` for each tensor and object.

        ``rank``: see :func:`.encoding.decode`. Raises: ``CheckpointError`` if the structure is invalid.
        """
        found = encoding.decode(self.index.state[name], self._saved_names.get(name, name), rank)
        for leaf in encoding.marks(found):
            leaf.stored = self.index.find(leaf.name)
            if leaf.stored is None:
                raise CheckpointError(f"The structure of {name!r:.100} has {leaf.name!r:.100}, which is not stored.")
        return found

    def open_for(self, leaves: Iterable[Leaf]) -> None:
        """Open the files of ``leaves``. Raises: ``CheckpointError`` if one is not a regular file; ``OSError``."""
        for leaf in leaves:
            for chunk in leaf.stored.chunks or ():
                self.file(chunk.file)

    def read(self, leaves: Sequence[Leaf]) -> None:
        """Read each leaf's value into ``leaf.value``. Raises: ``CheckpointError`` if a value is invalid; ``OSError``.

        A tensor is read into ``live`` if the leaf is ``in_place``, otherwise into new memory. ``copy_`` converts a
        different dtype.
        """
        self.plan(leaves).run()

    @no_collection()
    def plan(self, leaves: Sequence[Leaf]) -> Transfer:
        """Return the transfer that :meth:`read` runs. Values that only the storage can read are read immediately."""
        transfer = Transfer(self.file)
        elsewhere: dict[str, Any] = {}
        for leaf in leaves:
            if (wholes := subclasses.wholes_of(leaf)) is not None:
                transfer.wholes += wholes
                continue
            if leaf.stored.dtype is not None:
                leaf.value = _memory_for(leaf)
            if leaf.stored.chunks is None:
                elsewhere[leaf.name] = leaf.value
            elif leaf.stored.dtype is None:
                transfer.add_object(leaf, self.load_object)
            else:
                for start, part in _local_parts(leaf.value):
                    transfer.add_tensor(part, start, leaf.stored, leaf.name)
        if elsewhere:
            self._read_elsewhere(elsewhere)
            for leaf in leaves:
                leaf.value = elsewhere.get(leaf.name, leaf.value)
        return transfer

    def load_object(self, name: str, data: bytes | bytearray) -> Any:
        """Return the object that ``torch.save`` wrote as ``data``. Raises: the errors of :func:`.pickled.load`."""
        return pickled.load(name, data)

    def _read_elsewhere(self, wanted: dict[str, Any]) -> None:
        """Read through the reader of another package's storage, as ``torch.distributed.checkpoint.load`` does."""
        storage = self._storage
        if storage is None or is_builtin(storage):  # a builtin storage reports all offsets
            name = next(iter(wanted))
            raise CheckpointError(f"{INDEX} of {self.path} is invalid: it has no offset of {name!r:.100}.")
        read_through(storage, self.path, wanted, self.load_object)

    def file(self, name: str) -> Readable:
        """Return an open file of the checkpoint. Raises: the errors of :meth:`open_for`."""
        if name not in self._files:
            self._files[name] = File(os.path.join(self.path, name))
            self.callback(self._files[name].stream.close)
        return self._files[name]


def read_index(checkpoint: Checkpoint) -> bytes:
    """Return the index file of a checkpoint. Raises: ``CheckpointError`` if it is missing or corrupt; ``OSError``."""
    path, mark = checkpoint.path, checkpoint.manifest.files.get(INDEX)
    if mark is None or mark.bytes > INDEX_BYTES:
        what = f"no {INDEX}" if mark is None else f"an {INDEX} of {mark.bytes:,} bytes, which is too large"
        raise CheckpointError(f"{path} has {what}.")
    file = File(f"{path}/{INDEX}")
    with file.stream:
        data = bytes(file.read(0, mark.bytes))
    if crc32(data) != mark.crc32:
        raise CheckpointError(f"{INDEX} of {path} is corrupt: CRC-32 mismatch.") from ValueError("CRC-32")
    return data


class Readable(ABC):
    """A file that a :class:`Transfer` reads. Thread-safe if it is ``local``: on this machine."""

    local: bool

    @abstractmethod
    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes at ``offset``. Raises: ``OSError``, for example if the file is too short."""

    @abstractmethod
    def fetch_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` like :meth:`read_into`. Needs only one request for a remote file. Thread-safe."""

    def read(self, offset: int, length: int) -> bytearray:
        """Return the ``length`` bytes at ``offset``. Raises the errors of :meth:`read_into`."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return data


class File(Readable):
    """A file of a checkpoint, open for reading."""

    def __init__(self, path: str) -> None:
        self._path, self._backend = path, backend_of(path)
        self.local = not self._backend.remote
        try:
            self.stream = self._backend.open(path)
        except UnfitFileError as error:
            raise CheckpointError(f"{path} is not a regular file") from error

    def read_into(self, offset: int, memory: memoryview) -> None:
        while memory:
            if self.local:
                count = os.preadv(self.stream.fileno(), [memory], offset)
            else:
                self.stream.seek(offset)
                count = self.stream.readinto(memory) or 0
            if count == 0:
                raise OSError(f"{self._path} ends at byte {offset}")
            memory, offset = memory[count:], offset + count

    def fetch_into(self, offset: int, memory: memoryview) -> None:
        if self.local:
            self.read_into(offset, memory)
            return
        data = self._backend.fetch(self._path, range(offset, offset + len(memory)))
        if len(data) != len(memory):
            raise OSError(f"{self._path} ends at byte {offset + len(data)}")
        memory[:] = data


def _memory_for(leaf: Leaf) -> Tensor:
    if leaf.in_place and leaf.live is not None:
        if not isinstance(leaf.live, ShardedTensor):
            torch.autograd.graph.increment_version(leaf.live)
        return leaf.live
    dtype = leaf.dtype or leaf.stored.dtype
    live = leaf.live
    if split_tensors.is_split(live) and leaf.stored.shape == split_tensors.shape_of(live):
        split = cast("Tensor", live)
        return split_tensors.carry(split, split.detach().to(dtype, copy=True))  # the copy includes the padding
    sharded = live if isinstance(live, DTensor) and leaf.placed != PLAIN else None
    if sharded is not None and leaf.placed is None and sharded.shape == leaf.stored.shape:
        if wraps(sharded):
            return subclasses.dtensor_like(sharded, torch.empty(sharded._local_tensor.shape, dtype=dtype, device="cpu"))
        return torch.empty_like(sharded, dtype=dtype)
    is_replicated = leaf.placed == REPLICATED  # otherwise inferred, for example for Adafactor's row and column factors
    if sharded is not None and (is_replicated or len(leaf.stored.shape) == sharded.ndim > 1):
        whole, mesh = torch.empty(leaf.stored.shape, dtype=dtype, device="cpu"), sharded.device_mesh
        return DTensor.from_local(whole.to(sharded.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if strides := leaf.strides or _strides_of(leaf.stored):
        return torch.empty_strided(leaf.stored.shape, strides, dtype=dtype, device="cpu")
    return torch.empty(leaf.stored.shape, dtype=dtype, device="cpu")


def _strides_of(stored: Stored) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is stored in one chunk; ``None`` for row-major order or several chunks."""
    [chunk] = stored.chunks if stored.chunks is not None and len(stored.chunks) == 1 else [None]
    return chunk.layout if chunk is not None and isinstance(chunk.layout, tuple) else None


def _local_parts(x: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the shards of a tensor in this process, each with its offsets in the whole tensor."""
    if isinstance(x, ShardedTensor):
        for shard in x.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    elif split_tensors.is_split(x):
        yield from ((tuple(start), data) for start, data in split_tensors.parts_of(x) if data.numel())
    elif isinstance(x, DTensor):
        for chunk in x.__create_chunk_list__():
            local = x.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            if local.numel():
                yield tuple(chunk.offsets), local.detach()
    elif x.numel():
        yield (0,) * x.ndim, x.detach()


class _Move(NamedTuple):
    """A range of a file, and the address that its bytes are copied to."""

    offset: int
    length: int
    address: int


class Transfer:
    """The ranges of files to read, and their destinations in memory."""

    def __init__(self, file: Callable[[str], Readable]) -> None:
        self._file = file
        self.moves: dict[str, list[_Move]] = defaultdict(list)  # moves by file
        # Objects, and chunks that are converted, because their element order or dtype differs from the tensor.
        self.wholes: list[Whole] = []
        self._kept: list[Tensor] = []  # keeps the memory of all addresses alive

    def ranges(self) -> dict[str, list[range]]:
        """Return the ranges to read, by file."""
        found: dict[str, list[range]] = defaultdict(list)
        for name, moves in self.moves.items():
            found[name] += [range(move.offset, move.offset + move.length) for move in moves]
        for whole in self.wholes:
            found[whole.file].append(range(whole.offset, whole.offset + whole.length))
        return found

    def add_tensor(self, part: Tensor, start: tuple[int, ...], stored: Stored, name: str) -> None:
        """Add the shard ``part``, whose offsets in the whole tensor are ``start``, to be filled from stored chunks."""
        plain = is_plain_memory(part) and part.dtype == stored.dtype
        for chunk in stored.chunks or ():
            if plain and chunk.layout is None and chunk.start == start and chunk.shape == part.shape:
                self._move(chunk.file, chunk.offset, part)
                continue
            low = [max(a, b) for a, b in zip(chunk.start, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(chunk.start, chunk.shape, start, part.shape, strict=True)]
            if any(begin >= end for begin, end in zip(low, high, strict=True)):
                continue
            to, box = part[_slices(low, high, start)], _slices(low, high, chunk.start)
            there = torch.empty(chunk.shape, dtype=stored.dtype, device="meta")[box]
            if plain and chunk.layout is None and to.is_contiguous() and there.is_contiguous():
                self._move(chunk.file, chunk.offset + int(there.storage_offset()) * there.itemsize, to)
            else:
                take = partial(_copy, chunk, cast("torch.dtype", stored.dtype), box, to, name)
                self.wholes.append(Whole(chunk.file, chunk.offset, chunk.length, take))

    def _move(self, file: str, offset: int, to: Tensor) -> None:
        self._kept.append(to)
        for at in range(0, to.nbytes, _PIECE_BYTES):
            self.moves[file].append(_Move(offset + at, min(_PIECE_BYTES, to.nbytes - at), to.data_ptr() + at))

    def add_object(self, leaf: Leaf, load: Callable[[str, bytearray], Any]) -> None:
        [chunk] = leaf.stored.chunks

        def take(data: bytearray) -> None:
            leaf.value = load(leaf.name, data)

        self.wholes.append(Whole(chunk.file, chunk.offset, chunk.length, take))

    def run(self) -> None:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="stagereg-read") as threads:
            for name, moves in self.moves.items():
                file = self._file(name)
                fetch = threads.map if file.local else map
                list(fetch(partial(_fetch, file), _jobs(sorted(moves))))
        for name, offset, length, take in self.wholes:
            take(self._file(name).read(offset, length))


def _copy(chunk: Chunk, dtype: torch.dtype, box: tuple[slice, ...], to: Tensor, name: str, data: bytearray) -> None:
    if chunk.layout == ARCHIVE:
        stored = subclasses.load_part(name, chunk, dtype, data)
        if wraps(stored):
            raise CheckpointError(f"{name!r:.100} is a {name_of(stored)}, which is not a dense tensor.")
    else:
        stored = elements_of(torch.frombuffer(data, dtype=torch.uint8), chunk, dtype)
    with torch.no_grad():
        to.copy_(stored[box])


def elements_of(data: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a chunk as a tensor with the chunk's shape. The tensor is a view."""
    flat = data.view(dtype)
    return flat.as_strided(chunk.shape, chunk.layout) if isinstance(chunk.layout, tuple) else flat.view(chunk.shape)


def _slices(low: list[int], high: list[int], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - at, end - at) for begin, end, at in zip(low, high, start, strict=True))


def _jobs(moves: list[_Move]) -> Iterator[list[_Move]]:
    """Group moves, sorted by offset, into reads: one long move, or several short moves that are close together."""
    run: list[_Move] = []
    for move in moves:
        if run:
            is_long = max(move.length, run[-1].length) > _SMALL_BYTES
            if is_long or move.offset + move.length - run[0].offset > _RUN_BYTES:
                yield run
                run = []
        run.append(move)
    if run:
        yield run


def _fetch(file: Readable, moves: list[_Move]) -> None:
    """Read bytes of a file once, and copy them to the addresses of ``moves``."""
    begin, length, address = moves[0]
    if len(moves) == 1:
        file.read_into(begin, memoryview((ctypes.c_char * length).from_address(address)).cast("B"))
        return
    data = file.read(begin, max(move.offset + move.length for move in moves) - begin)
    source = ctypes.addressof(ctypes.c_char.from_buffer(data))
    for move in moves:
        ctypes.memmove(move.address, source + move.offset - begin, move.length)
