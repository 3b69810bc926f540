"""What a storage is: torch's ``StorageWriter`` that also names its reader.

The signatures are those of ``torch.distributed.checkpoint.StorageWriter`` (torch 2.13), so a storage goes into
``torch.distributed.checkpoint.save(storage_writer=...)`` as it is, and a writer made for torch is a storage here once
it has :meth:`Storage.reader`. What the checkpointer asks beyond torch is told in :class:`Storage`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from stagereg.checkpoint.manifest import FileMark

__all__ = ["Storage"]


class Storage(StorageWriter):
    """Writes the entries of a checkpoint into a directory.

    The order of calls on each rank, by a checkpointer or by ``torch.distributed.checkpoint.save``, on one thread:

    1. ``reset(checkpoint_id)`` names the directory, which is empty or not there.
    2. ``set_up_storage_writer``, ``prepare_local_plan``, and on the coordinator ``prepare_global_plan``.
    3. ``write_data`` writes this rank's files; the coordinator's ``finish`` follows when all ranks have written theirs.
    4. ``marks`` tells what was written, if the storage has them. Steps 1 to 4 may come again.

    A storage promises:

    1. *Whole or an error.* What the disk refuses is an ``OSError`` that says what the operating system said.
    2. *On the disk.* A file that has a mark is flushed to the disk; the checkpointer flushes the others.
    3. *Bit for bit.* What :meth:`reader` reads equals what was given, also in another process and on other ranks.
    4. *No arguments needed.* It can be built without arguments, so that a checkpoint tells by the name of its storage
       how it is to be read.
    5. *Portable.* It can be pickled before ``write_data`` and after it, where a process of its own is to write.

    Not asked of every storage, and looked for by name: ``margins``, a pair of bytes. A stager that can is told to leave
    as much free before and after each tensor, which the storage may then write on, see :mod:`stagereg.kernel.memory`.
    ``remote``, whether it can write to URLs; one that says false is refused where checkpoints go to one.

    A subclass has to write torch's methods and ``reader``.
    """

    @abstractmethod
    def reader(self, path: str | os.PathLike[str]) -> StorageReader:
        """Return a reader of the checkpoint in the directory ``path``, new for each call. Any rank, any thread."""

    @property
    def marks(self) -> Mapping[str, FileMark]:
        """Size and CRC-32 of each file that this process wrote in the last ``write_data`` and ``finish``.

        By name inside the directory, from the bytes on their way. The checkpointer reads files without a mark again.
        """
        return {}
