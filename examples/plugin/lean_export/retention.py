"""``checkpoint/keep=thinned``: retains the newest checkpoints, and fewer and fewer of the older ones."""

from __future__ import annotations

from collections.abc import Mapping

from stagereg.plugin import Checkpoint, ConfigError

__all__ = ["ThinnedRule"]


class ThinnedRule:
    """Retains the newest checkpoints, then every second one, then every fourth, and so on.

    A checkpoint that the rule retains now was also retained after each earlier save.

    Args:
        dense: number of newest checkpoints that are all retained, at least 1.
    """

    def __init__(self, dense: int = 4) -> None:
        if dense < 1:
            raise ConfigError(f"checkpoint.keep.dense must be at least 1, got {dense}.")
        self.dense = dense

    def select(self, checkpoints: list[Checkpoint], metrics: Mapping[str, Mapping[str, float]], /) -> dict[str, str]:
        """Return the paths of the checkpoints to retain, with the reasons. ``checkpoints`` begins with the newest."""
        retained = {}
        for each in checkpoints:
            age = checkpoints[0].manifest.serial - each.manifest.serial  # number of commits since this checkpoint
            spacing = 1 << (age // self.dense).bit_length()
            if age < self.dense or each.manifest.serial % spacing == 0:
                retained[each.path] = "newest" if age < self.dense else f"one of {spacing}"
        return retained
