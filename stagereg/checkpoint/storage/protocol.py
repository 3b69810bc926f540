"""The protocol of a storage, a ``StorageWriter`` (torch 2.13) that also returns its reader, and the names of storages.

Any ``StorageWriter`` of torch is a storage if it has :meth:`Storage.reader`; a subclass of :class:`Storage` may also
define optional members. A manifest contains the name of its storage: the registered name, otherwise the dotted path of
the class. The project's own storages keep their names even if another package registers the same name.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import stagereg.registry as registry
from stagereg.base.installed import DISTRIBUTION
from stagereg.base.option_text import choice
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.errors import CheckpointError, StageregError

_OURS = f"@{DISTRIBUTION}"


class Storage(StorageWriter):
    """Writes the entries of a checkpoint into a directory.

    The order of calls on each rank, by a checkpointer or by ``torch.distributed.checkpoint.save``, on one thread:

    1. ``reset(checkpoint_id)`` sets the directory, which is empty or does not exist.
    2. ``set_up_storage_writer``, ``prepare_local_plan``, and on the coordinator ``prepare_global_plan``.
    3. ``write_data`` writes this rank's files; the coordinator's ``finish`` follows when all ranks have written theirs.
    4. ``marks`` returns the digests of the files, if the storage has them. Steps 1 to 4 may be repeated.

    A storage must meet these requirements:

    1. *Complete or an error.* A failed write raises an ``OSError`` with the error of the operating system.
    2. *On the disk.* A file that has a digest is flushed to the disk; the checkpointer flushes all other files.
    3. *Bit for bit.* :meth:`reader` reads the values that were written, even in another process and on other ranks.
    4. *No arguments needed.* It can be built without arguments, because a checkpoint records only the name of its
       storage.
    5. *Portable.* It can be pickled before ``write_data`` and after it.

    A subclass must define torch's methods and ``reader``.

    Attributes:
        remote: False if the storage writes only to file systems of this machine. Saving to a URL then fails.
        wraps: the wrapped storage, which writes for this one. The manifest names the wrapped storage, which also reads.
    """

    remote: bool = True
    wraps: Storage | None = None

    @abstractmethod
    def reader(self, path: str | os.PathLike[str]) -> StorageReader:
        """Return a new reader of the checkpoint in the directory ``path``. Thread-safe; called on any rank.

        The checkpointer uses it for results that are neither :class:`TensorResult` nor :class:`ArchiveResult`. It reads
        back the first save with a storage of another package, and fails the save if any value differs.
        """

    @property
    def finished(self) -> bytes | None:
        """The content of ``.metadata`` from the last ``finish``; ``None`` if each save must call ``finish``.

        If it is not ``None``, ``finish`` must write no other file, and ``finish`` and ``prepare_global_plan`` must be
        deterministic: if all ranks write the same values to the same places as in the last save, the checkpointer
        writes this content instead of calling the two methods.
        """
        return None

    @property
    def marks(self) -> Mapping[str, FileDigest]:
        """The size and CRC-32 of each file that this process wrote in the last ``write_data`` and ``finish``, if known.

        The names are relative to the directory. The digests are computed from the bytes that are written. The
        checkpointer reads every other file once more to compute its digest.
        """
        return {}


def is_builtin(storage: Storage) -> bool:
    """Return whether a storage belongs to stagereg. Such a storage reports offsets, so its reader is not needed."""
    return type(storage).__module__.startswith("stagereg.")


def name_of(storage: Storage) -> str:
    """Return the name of ``storage`` in a manifest; for a wrapper the name of the wrapped storage."""
    storage = (storage.wraps if isinstance(storage, Storage) else None) or storage
    path = f"{type(storage).__module__}.{type(storage).__qualname__}"
    entry = registry.find_target(path)
    return path if entry is None or entry.kind != "storage" else entry.name.removesuffix(_OURS)


def expect_fit(storage: Storage, path: str) -> None:
    """Raise ``CheckpointError`` if ``path`` is a URL and ``storage`` does not write to URLs."""
    if path and isinstance(storage, Storage) and not storage.remote and backend_of(path).remote:
        raise CheckpointError(
            f"{choice('storage', name_of(storage))} writes only to file systems of this machine, not to {path}. Use "
            f"{choice('storage', 'dcp')}."
        )


def named(name: str, own: Storage) -> Storage:
    """Return ``own`` if ``name`` is its name, otherwise build it. Raises: ``CheckpointError`` if this fails."""
    if name == name_of(own):
        return own
    try:
        ours = name + _OURS in registry.names("storage")
        return registry.build("storage", name + _OURS if ours else name)
    except (StageregError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint was written by the storage {name!r}, which cannot be built. Install or import its "
            f"package, or pass the storage to the Checkpointer: {error}"
        ) from error
