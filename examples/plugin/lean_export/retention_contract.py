"""The contract of the rule, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

from stagereg.testing import KeepContract

from lean_export.retention import ThinnedRule

__all__ = ["ThinnedContract"]


class ThinnedContract(KeepContract):
    """Tests ``checkpoint/keep=thinned``."""

    def make(self) -> ThinnedRule:
        """Return a rule with a small ``dense``, so that it deletes some of the older checkpoints."""
        return ThinnedRule(dense=2)
