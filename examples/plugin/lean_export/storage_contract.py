"""How the storage is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

from stagereg.testing import StorageContract

from lean_export.storage import ZippedStorage

__all__ = ["ZippedContract"]


class ZippedContract(StorageContract):
    """``storage=zipped`` keeps every promise."""

    def make(self) -> ZippedStorage:
        """Return one with another level than the default."""
        return ZippedStorage(level=2)
