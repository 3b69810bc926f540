"""The stagers that are done when ``stage`` returns: a kernel copier behind torch's protocol."""

from __future__ import annotations

from typing import Any

from stagereg.kernel.copier import HostCopier
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.bounded import BoundedCopier

__all__ = ["HostStager"]


class HostStager(AsyncStager):
    """Base of the stagers that copy at once; a subclass chooses the memory by choosing the copier.

    Not for use from several threads at once.
    """

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier
        self._synchronize_after_execute = isinstance(copier, BoundedCopier)

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
        """
        copied: StateDict = self._copier.copy(state_dict)
        return copied

    def reserve_padding(self, before: int, after: int) -> None:
        """Leave so many bytes free around each tensor, see :class:`.ReservesPadding`."""
        self._copier.reserve_padding(before, after)

    def expect_release(self) -> None:
        """Wait longer for this reader, which promises to release each copy, see :class:`.ReleasesCopies`."""
        self._copier.pool.expect_release()

    def release(self, staged: Any) -> None:
        """End the reader's use of a copy and empty it, see :class:`.ReleasesCopies`."""
        self._copier.pool.release(staged)

    def synchronize_staging(self) -> None:
        """Wait, with ``host_memory_gb`` alone, until the tensors that did not fit have been written.

        Raises:
            StagingError: the reader keeps them instead of writing them; see :meth:`.BoundedCopier.settle`.
        """
        if isinstance(self._copier, BoundedCopier):
            self._copier.settle()

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._copier.close()
