"""How the tier is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

from typing import Any

from stagereg.testing import TierContract

from lean_export.tier import LocalSsdTier

__all__ = ["LocalSsdContract"]


class LocalSsdContract(TierContract):
    """``tier=local_ssd`` keeps every promise."""

    def make(self, dir: str, **options: Any) -> LocalSsdTier:
        """Return one in a folder of the trial."""
        return LocalSsdTier(dir, **options)
