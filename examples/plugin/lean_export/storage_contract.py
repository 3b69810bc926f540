"""The contract of the storage, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

from stagereg.testing import StorageContract

from lean_export.storage import ZippedStorage

__all__ = ["ZippedContract"]


class ZippedContract(StorageContract):
    """Tests ``storage=zipped``."""

    def make(self) -> ZippedStorage:
        """Return a storage with a level other than the default."""
        return ZippedStorage(level=2)
