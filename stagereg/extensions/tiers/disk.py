"""``disk``: a tier on a local disk of each machine. Its files survive a reboot."""

from __future__ import annotations

from stagereg.extensions.tiers.tier import Tier, made
from stagereg.registry import register


@register("tier", "disk")
class DiskTier(Tier):
    """Stores steps in ``tier.dir``, a folder on a local disk of each machine. Uses direct I/O and flushes the files."""

    durable = True

    def prepare(self) -> str:
        return made(self.dir)
