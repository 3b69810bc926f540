"""Copies a checkpoint without the entries of optimizers, for ``checkpoint.keep.weights_after``.

An entry belongs to an optimizer if its saved structure is the state of an optimizer (:func:`.as_by_name`). The values
of all other entries are copied byte by byte: ``.metadata`` has the range of each value in the files. So the copy needs
neither memory for tensors nor the objects of the program. The whole checkpoint is read, to verify its checksums.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, Found, differences
from stagereg.checkpoint.format.encoding import Encoded, decode
from stagereg.checkpoint.format.index import INDEX, Readable, expect_readable, make_index
from stagereg.checkpoint.format.manifest import METADATA, Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.state.optimizer_forms import as_by_name
from stagereg.checkpoint.storage.aligned import AlignedFile, make_buffers
from stagereg.checkpoint.storage.files import torch_reader
from stagereg.checkpoint.storage.reading import File, read_index
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError, CorruptCheckpointError

STORAGES = ("dcp", "torch_dcp")  # the storages whose values can be moved inside a file

_ALIGNMENT = 64  # bytes; torch aligns tensors in its archives to this, so that programs can map the files
_PIECE_BYTES = 1 << 23


class StoppedError(Exception):
    """The copy was not completed, because the run ends."""


class WeightsCopy:
    """A copy of the checkpoint ``whole`` without the entries of optimizers, in the new directory ``written``.

    ``is_stopped``: returns True if the run ends. Used by one thread.
    """

    def __init__(self, store: CheckpointStore, whole: Checkpoint, written: str, is_stopped: Callable[[], bool]) -> None:
        self._store, self._whole, self._written, self._is_stopped = store, whole, written, is_stopped
        self._files: dict[str, FileDigest] = {}
        self._moved: dict[str, dict[range, int]] = {}  # new offset of each copied range, by file

    def write(self) -> Manifest:
        """Write the copy, make it durable and read it back. Return its manifest.

        Raises:
            StoppedError: the run ends.
            CorruptCheckpointError: a file of the whole checkpoint is corrupt.
            CheckpointError: no entry belongs to an optimizer, or another storage wrote the checkpoint. Also
                ``OSError``, and any error of an invalid file.
        """
        store, whole, written = self._store, self._whole, self._written
        if whole.manifest.storage not in STORAGES:
            raise CheckpointError(f"its storage is {whole.manifest.storage}, not {' or '.join(STORAGES)}")
        self._expect_valid(store.contents(whole.path, {INDEX: WHOLE, METADATA: WHOLE}))
        index = json.loads(read_index(whole))
        dropped = [name for name, tree in index["state"].items() if as_by_name(decode(tree, name)) is not None]
        if not dropped:
            raise CheckpointError("none of its entries is the state of an optimizer")
        metadata = torch_reader(whole.path).read_metadata()
        paths: Mapping[str, Any] = metadata.planner_data
        stay = {name for name in metadata.state_dict_metadata if paths[name][0] not in dropped}
        store.backend.make(written)
        self._copy_files(metadata, stay)
        self._put(METADATA, self._metadata(metadata, stay))
        self._put(INDEX, self._index(index, stay, dropped))
        made = dataclasses.replace(whole.manifest, files=self._files, dropped=dropped)
        made.expect_readable(written)
        if wrong := differences(made, store.contents(written, dict.fromkeys(self._files, WHOLE))):
            raise CheckpointError(f"the copy in {written} does not read back as it was written: {wrong}")
        return made

    def _copy_files(self, metadata: Metadata, stay: set[str]) -> None:
        manifest = self._whole.manifest
        ranges: dict[str, set[range]] = {info.relative_path: set() for info in metadata.storage_data.values()}
        for at, info in metadata.storage_data.items():
            if at.fqn in stay:
                ranges[info.relative_path].add(_range(info))
        for name in manifest.files.keys() - ranges.keys() - {INDEX, METADATA}:
            ranges[name] = {range(manifest.files[name].bytes)}
        for name, own in ranges.items():
            sink, source = self._store.backend.create(f"{self._written}/{name}", True), self._whole.path
            with AlignedFile(sink, make_buffers(_PIECE_BYTES)) as file:
                self._copy(name, File(f"{source}/{name}"), sorted(own, key=lambda each: each.start), file)
                self._files[name] = file.finish()

    def _copy(self, name: str, source: File, ranges: Sequence[range], file: AlignedFile) -> None:
        """Copy the ``ranges`` of a file. Raises: ``CorruptCheckpointError`` if the file is corrupt."""
        size, crc, at = self._whole.manifest.files[name].bytes, 0, 0
        moved = self._moved[name] = {}
        with source.stream:
            for own in (*ranges, range(size, size)):
                if own.start < at:
                    raise CheckpointError(f"two values in {name} overlap at byte {own.start}")
                for part in (range(at, own.start), own):
                    if part is own and own:
                        file.write(bytes((own.start - file.tell()) % _ALIGNMENT))
                        moved[own] = file.tell()
                    for begin in range(part.start, part.stop, _PIECE_BYTES):
                        if self._is_stopped():
                            raise StoppedError
                        data = source.read(begin, min(_PIECE_BYTES, part.stop - begin))
                        crc = crc32(data, crc)
                        if part is own:
                            file.write(memoryview(data))
                at = own.stop
        self._expect_valid({name: FileDigest(at, crc)})

    def _metadata(self, metadata: Metadata, stay: set[str]) -> bytes:
        """Return the content of ``.metadata`` for the names in ``stay``."""
        kinds, paths, infos = metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data
        metadata.state_dict_metadata = {name: each for name, each in kinds.items() if name in stay}
        metadata.planner_data = {name: path for name, path in paths.items() if name in stay}
        metadata.storage_data = {
            at: dataclasses.replace(info, offset=self._moved[info.relative_path][_range(info)])
            for at, info in infos.items()
            if at.fqn in stay
        }
        metadata.storage_meta = None  # the reader has written the ID of this read into it
        return pickle.dumps(metadata)

    def _index(self, index: Mapping[str, Any], stay: set[str], dropped: Sequence[str]) -> bytes:
        """Return the content of ``index.json``. Raises: ``CheckpointError`` if it would be invalid."""
        known = [[*self._moved[name].items()] for name in index["files"]]

        def place(chunk: Sequence[Any]) -> list[Any]:
            file, offset, length, *part = chunk
            own, to = known[file][bisect_right(known[file], offset, key=lambda each: each[0].start) - 1]
            if offset + length > own.stop:
                raise CheckpointError(f"{INDEX} has a value at byte {offset} that {METADATA} does not have")
            return [file, to + offset - own.start, length, *part]

        tables = {name: each for name, each in index.items() if name != "state"}
        tables["tensors"] = {
            name: [dtype, shape, chunks and [place(each) for each in chunks]]
            for name, (dtype, shape, chunks) in index["tensors"].items()
            if name in stay
        }
        tables["objects"] = {name: each and place(each) for name, each in index["objects"].items() if name in stay}
        text = json.dumps(tables)
        state = {name: Encoded(json.dumps(tree), []) for name, tree in index["state"].items() if name not in dropped}
        data = make_index(text, state)
        expect_readable(data, text, state, {name: mark.bytes for name, mark in self._files.items()}, Readable())
        return data

    def _put(self, name: str, data: bytes) -> None:
        self._store.backend.write(f"{self._written}/{name}", data)
        self._files[name] = FileDigest(len(data), crc32(data))

    def _expect_valid(self, found: Mapping[str, Found]) -> None:
        manifest = self._whole.manifest
        files = {name: manifest.files[name] for name in found}
        if wrong := differences(dataclasses.replace(manifest, files=files), found):
            raise CorruptCheckpointError(f"it is corrupt: {wrong}")


def _range(info: Any) -> range:
    return range(info.offset, info.offset + info.length)
