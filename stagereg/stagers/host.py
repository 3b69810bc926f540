"""The stagers that are done when ``stage`` returns: a kernel copier behind torch's protocol."""

from __future__ import annotations

from typing import Any

from stagereg.errors import RegistryError
from stagereg.kernel.copier import HostCopier
from stagereg.stagers.async_stager import AsyncStager, StateDict


class HostStager(AsyncStager):
    """Base of the stagers that copy with the kernel; a subclass chooses the memory by choosing the copier.

    Not for use from several threads at once.

    A forked child, such as a worker of a ``DataLoader``, may call ``stage``, which takes memory of its own.
    The child may read the copies that are held at the fork. It may not if their reader has promised to release them,
    as a ``Checkpointer`` does: reading such a copy ends the child with SIGSEGV.

    Args:
        copier: what copies. The others are options that subclasses have in common, explained here for all of them.
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds that ``stage`` waits at most for a reader that releases its copies (``Checkpointer``), and one
            second at most for any other; then it takes memory beyond the bound, which is logged once.
        threads: threads that copy from host memory, the caller's among them.
        pin: page-lock the memory; None means where an accelerator is available.
    """

    _synchronize_after_execute = False

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        if name == "_copier":
            raise RegistryError(f"{type(self).__name__}.__init__ does not call super().__init__(), which it has to.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
        """
        copied: StateDict = self._copier.copy(state_dict)
        return copied

    def expect_release(self) -> None:
        self._copier.pool.readers_release = True

    def release(self, staged: Any) -> None:
        self._copier.pool.release(staged)

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._copier.close()
