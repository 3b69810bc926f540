"""The stager that is done when ``stage`` returns: a kernel copier behind torch's protocol."""

from __future__ import annotations

from stagereg.kernel.copy import HostCopier
from stagereg.stagers.protocol import AsyncStager, StateDict

__all__ = ["HostStager"]


class HostStager(AsyncStager):
    """Base of the stagers that copy at once; a subclass chooses the memory by choosing the copier.

    Not for use from several threads at once.
    """

    _synchronize_after_execute: bool = False

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
        """
        copied: StateDict = self._copier.copy(state_dict)
        return copied

    def leave_room(self, before: int, after: int) -> None:
        """Leave so many bytes free around each tensor in the copies to come, for a storage that writes them in place.

        See :func:`stagereg.kernel.room.room_around`.
        """
        self._copier.leave_room(before, after)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` has waited."""

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._copier.close()
