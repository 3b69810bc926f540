"""``disk``: files on a disk of the machine's own, which outlive a reboot too."""

from __future__ import annotations

from stagereg.extensions.tiers.tier import Tier, made
from stagereg.registry import register


@register("tier", "disk")
class DiskTier(Tier):
    """Keeps steps on each machine's own disk, ``tier.dir``, written past the page cache and flushed."""

    durable = True

    def prepare(self) -> str:
        """Make the folder and return it. Raises: ``OSError``; ``ConfigError`` if it is another user's."""
        return made(self.dir)
