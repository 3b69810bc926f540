"""A part on its way in from another machine: hidden files, which become a part when every block is there and right."""

from __future__ import annotations

import os
import secrets

from stagereg.base.small_files import discard, sync, write_new
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.folder import MachineFolder
from stagereg.extensions.tiers.part import Part


class IncomingPart:
    """One of them. Each sender has a hidden folder of its own, so that two, or a dead one, never meet.

    ``durable``: whether it is flushed before it is complete. Any method may raise ``OSError``, as of a full disk.

    Attributes:
        left: bytes that are yet to come.
    """

    def __init__(self, part: Part, folder: MachineFolder, durable: bool) -> None:
        self.part, self._folder, self._durable = part, folder, durable
        self._hidden = f"{folder.directory(part.save)}/.{secrets.token_hex(16)}.tmp"
        folder.make(part.save)
        os.mkdir(self._hidden, 0o700)
        self._missing = {(name, number) for name, file in part.files.items() for number in range(len(file.blocks))}
        self.left = part.nbytes
        self._half = len(self._missing) // 2
        for name in part.files:
            write_new(f"{self._hidden}/{name}", b"", 0o600, flush=False)

    def write(self, name: str, number: int, block: memoryview) -> None:
        """Take a block whose checksum is right."""
        at, begin = 0, self.part.files[name].block(number).start
        descriptor = os.open(f"{self._hidden}/{name}", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while at < len(block):
                at += os.pwrite(descriptor, block[at:], begin + at)
            if self._durable:  # at once, so that the page cache stays as training needs it
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, begin, len(block), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if (name, number) in self._missing:
            self._missing.remove((name, number))
            self.left -= len(block)
            if len(self._missing) == self._half:
                failpoint("receiving")

    def complete(self) -> None:
        """Make it a part of this machine. Raises: ``CheckpointError`` if not all of it has come."""
        if self._missing:
            name, number = min(self._missing)
            raise CheckpointError(f"{len(self._missing)} blocks have not come, among them block {number} of {name}")
        failpoint("received")
        directory = self._folder.directory(self.part.save)
        for name in self.part.files:
            if self._durable:
                sync(f"{self._hidden}/{name}")
            os.replace(f"{self._hidden}/{name}", f"{directory}/{name}")
        os.rmdir(self._hidden)
        self._folder.complete(self.part, received=True)

    def discard(self) -> None:
        """Delete what has come, unless it is complete. Twice is harmless; raises nothing."""
        discard(self._hidden)
