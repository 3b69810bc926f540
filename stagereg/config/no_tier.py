"""The option ``tier=none``, in the core so that a config can select it if the tiers extension is not installed."""

from __future__ import annotations

from stagereg.registry import register


@register("tier", "none")
class NoTier:
    """No local tier."""

    durable = False

    def __str__(self) -> str:
        """Return the name of the option, which the ranks compare."""
        return "none"

    def prepare(self) -> str:
        return ""

    def lacking(self, nbytes: int) -> str:
        return ""
