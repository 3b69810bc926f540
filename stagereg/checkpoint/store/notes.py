"""Small named files beside the checkpoints of a store."""

from __future__ import annotations

from stagereg.checkpoint.store.backend import Backend


class Notes:
    """The notes of a store; any process reads, and the run that holds the lock writes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, name: str) -> bytes:
        """Return a note; empty if it is not there."""
        try:
            return self._backend.read(f"{self._backend.root}/{name}")
        except FileNotFoundError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a note in one step, safely stored; delete it if empty."""
        self._backend.replace(name, data)
