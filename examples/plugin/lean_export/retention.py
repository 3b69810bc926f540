"""``checkpoint/keep=thinned``: the newest checkpoints, and of older ones the fewer, the older they are."""

from __future__ import annotations

from collections.abc import Mapping

from stagereg.plugin import Checkpoint, ConfigError

__all__ = ["ThinnedRule"]


class ThinnedRule:
    """Retains the newest checkpoints, then every second one, then every fourth, and so on.

    A checkpoint that the rule retains now was also retained after each earlier save.

    Args:
        dense: how many of the newest are all retained, at least 1.
    """

    def __init__(self, dense: int = 4) -> None:
        if dense < 1:
            raise ConfigError(f"checkpoint.keep.dense is {dense}, and must be at least 1.")
        self.dense = dense

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> dict[str, str]:
        """Return the paths of those to retain, and why; the newest comes first."""
        retained = {}
        for each in checkpoints:
            age = checkpoints[0].manifest.serial - each.manifest.serial  # in commits of the run
            spacing = 1 << (age // self.dense).bit_length()
            if age < self.dense or each.manifest.serial % spacing == 0:
                retained[each.path] = "newest" if age < self.dense else f"one of {spacing}"
        return retained
