"""The names that a plugin may import, listed in ``plugin.pyi``. Each is imported at its first use.

Before 1.0, a minor version may change these names, and the changelog describes how to adapt a plugin. From 1.0 on, only
a major version may. Other modules of stagereg change without notice. The contracts are in :mod:`stagereg.testing`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import stagereg

_STUB = Path(__file__).with_suffix(".pyi")

__getattr__ = partial(stagereg._attribute, __name__, _STUB)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
