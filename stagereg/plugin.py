"""The names that a plugin may import, as listed in ``plugin.pyi``. Each name is imported at its first use.

Before 1.0, a minor version may change these names; the changelog then describes how to adapt a plugin. From 1.0 on,
only a major version may change them. Other modules of stagereg may change in any version. Contracts:
:mod:`stagereg.testing`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import stagereg

_STUB = Path(__file__).with_suffix(".pyi")

__getattr__ = partial(stagereg._attribute, __name__, _STUB)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
