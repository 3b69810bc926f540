"""How many examples a property-based test takes: all of them, or in ``make test`` as few as its profile says."""

from __future__ import annotations

from hypothesis import settings

_ALL = 100
"""Examples of a test that names no number, in the profiles that take all."""


def examples(number: int) -> int:
    """The share of ``number`` that the profile takes, at least one."""
    return max(1, number * settings.default.max_examples // _ALL)
