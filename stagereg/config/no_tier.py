"""The option ``tier=none``. It is in the core, so a config can select it without the tiers extension."""

from __future__ import annotations

from stagereg.registry import register


@register("tier", "none")
class NoTier:
    """No local tier."""

    durable = False

    def __str__(self) -> str:
        """Return the name of the option. The ranks compare it."""
        return "none"

    def prepare(self) -> str:
        return ""

    def lacking(self, nbytes: int) -> str:
        return ""
