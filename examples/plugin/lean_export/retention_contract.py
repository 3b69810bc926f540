"""How the rule is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

from stagereg.testing import KeepContract

from lean_export.retention import ThinnedRule

__all__ = ["ThinnedContract"]


class ThinnedContract(KeepContract):
    """``checkpoint/keep=thinned`` keeps every promise."""

    def make(self) -> ThinnedRule:
        """Return a rule with few newest checkpoints, so that it thins out the others."""
        return ThinnedRule(dense=2)
