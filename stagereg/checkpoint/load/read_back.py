"""Reads the first checkpoint of a third-party storage back before the commit, in the same way as a restore.

The storage may write files that its own reader cannot read, or reads as different values. Without this check, a run
would detect the error only when the run needs the checkpoint. Rank 0 checks the metadata of all entries, and
compares the bytes of some entries with the CRC-32 of the values that each rank passed to the storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stagereg.base.option_text import choice
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.encoding import Leaf, marks
from stagereg.checkpoint.format.index import Index
from stagereg.checkpoint.storage.digests import Written, bounded, digest
from stagereg.checkpoint.storage.protocol import Storage, name_of
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.errors import CheckpointError, reason

_UNREAD = 0xA5  # byte that fills memory before a read


def read_back(storage: Storage, path: str, index: bytes, sizes: Mapping[str, int], crcs: Mapping[Written, int]) -> None:
    """Raise ``CheckpointError`` if ``storage`` does not read back the values that it wrote.

    ``path``: the directory with the files of the uncommitted checkpoint. ``index``: the content of the index file.
    ``sizes``: file sizes in bytes, by name. ``crcs``: the CRC-32 of each value that a rank passed to the storage.
    """
    reads = getattr(storage, "wraps", None) or storage
    with _Files(path, Index.loads(index, sizes), reads) as files:
        entries = sorted(files.index.state, key=lambda name: name.startswith("stagereg."))  # the user's entries first
        leaves = [leaf for name in entries for leaf in marks(files.structure(name))]
        try:
            _expect_metadata([leaf for leaf in leaves if leaf.stored.chunks is None], reads, path)
            _expect_content(files, leaves, crcs)
        except _NotReadError as error:
            name = name_of(storage) if reads is storage else type(storage).__qualname__
            raise CheckpointError(
                f"the storage {name!r} does not read back the values that it wrote: {error}. Nothing was committed, "
                "because stagereg checks the first save of another package's storage. Test the "
                f"storage with stagereg.testing.StorageContract, or use stagereg's {choice('storage', 'dcp')}"
            ) from error.__cause__


class _NotReadError(Exception):
    """An entry was not read back with the written value; the message contains the entry's name and the difference."""


class _Files(CheckpointFiles):
    def _read_elsewhere(self, wanted: dict[str, Any]) -> None:
        for x in wanted.values():
            if isinstance(x, torch.Tensor):  # memory that the reader leaves unchanged must not match by chance
                torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage()).fill_(_UNREAD)
        super()._read_elsewhere(wanted)

    def load_object(self, name: str, data: bytes | bytearray) -> int:
        return crc32(data)


def _expect_metadata(leaves: Sequence[Leaf], storage: Storage, path: str) -> None:
    """Compare dtypes and shapes with the reader's metadata, for the entries that only this reader can read."""
    if not leaves:
        return
    try:
        found = storage.reader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise _wrong(leaves[0].name, f"cannot be read ({reason(error)})") from error
    for leaf in leaves:
        entry: Any = found.get(leaf.name)
        stored = leaf.stored
        if entry is None:
            raise _wrong(leaf.name, "is missing in the metadata that its reader returns")
        is_tensor = isinstance(entry, TensorStorageMetadata)
        have = (entry.properties.dtype, entry.size) if is_tensor else (None, torch.Size())
        if have != (stored.dtype, stored.shape):
            shown = [f"{dtype} {[*shape]}" if dtype else "an object" for dtype, shape in (have, stored[:2])]
            raise _wrong(leaf.name, f"should be {shown[1]}, but is {shown[0]} in the metadata that its reader returns")


def _expect_content(files: CheckpointFiles, leaves: Sequence[Leaf], written: Mapping[Written, int]) -> None:
    """Read a limited number of entries, and compare the CRC-32 of their bytes with ``written``."""
    known = {name for name, *_ in written}
    kinds = {leaf.name: leaf.stored for leaf in leaves if leaf.name in known}
    sizes = {name: x.shape.numel() * x.dtype.itemsize if x.dtype else 0 for name, x in kinds.items()}
    names = {*bounded(sizes)}
    chosen = [leaf for leaf in leaves if leaf.name in names]
    try:
        files.read(chosen)
    except Exception as error:
        raise _find_failing(files, chosen, error) from error
    places: dict[str, list[Written]] = {leaf.name: [] for leaf in chosen}
    for each in written:
        places.get(each[0], []).append(each)
    for leaf in chosen:
        for _, start, shape in places[leaf.name]:
            box = tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
            value = leaf.value if leaf.stored.dtype is None else digest(leaf.value[box])
            if value != (given := written[leaf.name, start, shape]):
                where = f" from {[*start]} on" if any(start) else ""
                raise _wrong(leaf.name, f"has other bytes{where} (CRC-32: expected {given:08x}, got {value:08x})")


def _find_failing(files: CheckpointFiles, leaves: Sequence[Leaf], error: Exception) -> _NotReadError:
    """Return an error with the name of the first entry that cannot be read. If each can be read, name the last."""
    for leaf in leaves:
        try:
            files.read([leaf])
        except Exception as found:
            error = found
            break
    return _wrong(leaf.name, f"cannot be read ({reason(error)})")


def _wrong(name: str, seen: str) -> _NotReadError:
    return _NotReadError(f"{name!r:.100} {seen}")
