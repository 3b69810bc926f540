"""``tier=none``: no local tier. Part of the core, so that configs can select it without the extension for tiers."""

from __future__ import annotations

from stagereg.registry import register


@register("tier", "none")
class NoTier:
    """No local tier."""

    durable = False

    def __str__(self) -> str:
        """Return the text that must be identical on all ranks."""
        return "none"

    def prepare(self) -> str:
        return ""

    def lacking(self, nbytes: int) -> str:
        return ""
