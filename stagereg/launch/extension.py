"""The protocols by which extensions plug into the launcher and into a rank.

An extension offers them in its module ``launching``: ``launcher(cfg)`` returns a :class:`LaunchExtension`, and
``rank(cfg)`` a :class:`RankExtension`. They are called in one order, by the names of the extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class LaunchExtension:
    """Accompanies one launcher. Each method does nothing here."""

    def check(self, cfg: Any) -> None:
        """Raise ``LaunchError`` for options of no use, while nothing has started."""

    def variables(self) -> Mapping[str, str]:
        """Return environment variables for the ranks."""
        return {}


class RankExtension:
    """Accompanies one rank. Each method does nothing here."""

    def around(self, rank: Any, cfg: Any) -> AbstractContextManager[None]:
        """Return what surrounds the job of this rank."""
        return nullcontext()

    def marked(self, moment: str) -> None:
        """The rank has come so far: imported, connected, in the job, at its first step."""

    def cause(self, error: Exception) -> str | None:
        """Return a better sentence on an error that other ranks have caused; may wait for one."""
        return None
