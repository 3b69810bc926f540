"""The contract of the tier, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

from typing import Any

from stagereg.testing import TierContract

from lean_export.tier import LocalSsdTier

__all__ = ["LocalSsdContract"]


class LocalSsdContract(TierContract):
    """Tests ``tier=local_ssd``."""

    def make(self, dir: str, **options: Any) -> LocalSsdTier:
        """Return a tier in a folder of the test."""
        return LocalSsdTier(dir, **options)
