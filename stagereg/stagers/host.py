"""The stager that is done when ``stage`` returns: a kernel copier behind torch's protocol."""

from __future__ import annotations

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.bounded import BoundedCopier

__all__ = ["HostStager", "copier_within"]


def copier_within(
    host_memory_gb: float | None, pool: Pool, max_in_flight: int, wait_s: float, threads: int, type_check: bool
) -> HostCopier:
    """Return a copier over ``pool`` whose ``max_in_flight`` copies take at most ``host_memory_gb`` GiB together.

    Raises:
        StagingError: the bound is not positive.
    """
    if host_memory_gb is None:
        return HostCopier(pool, threads, type_check)
    if host_memory_gb <= 0:
        raise StagingError([], f"host_memory_gb must be more than 0, not {host_memory_gb}; leave it out for no bound")
    return BoundedCopier(pool, int(host_memory_gb * 2**30 / max_in_flight), wait_s, threads, type_check)


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
        """Leave so many bytes free around each tensor in the copies to come, for a storage that writes them in place.

        See :func:`stagereg.kernel.memory.padding_around`.
        """
        self._copier.reserve_padding(before, after)

    def synchronize_staging(self) -> None:
        """Wait until what did not fit into the bound on host memory has been read; without one, ``stage`` has waited.

        Raises:
            StagingError: somebody keeps it instead of writing it; see :meth:`.BoundedCopier.settle`.
        """
        if isinstance(self._copier, BoundedCopier):
            self._copier.settle()

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._copier.close()
