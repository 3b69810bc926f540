"""``tier=none``: no local tier. The core has it, so that a config can choose it where no extension offers tiers."""

from __future__ import annotations

from stagereg.registry import register


@register("tier", "none")
class NoTier:
    """No local tier."""

    durable = False

    def __str__(self) -> str:
        """What has to be the same on all ranks."""
        return "none"

    def prepare(self) -> str:
        return ""

    def lacking(self, nbytes: int) -> str:
        return ""
