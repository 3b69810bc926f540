"""The checkpoint formats of other programs (:class:`.ForeignFormat`), which stagereg can load or at least identify."""

from __future__ import annotations

from stagereg.checkpoint.store.foreign import ForeignFormat
from stagereg.extensions.interop import other_formats, torch_directories


class _OfTorch:
    look = staticmethod(torch_directories.look)
    expect_none = staticmethod(other_formats.expect_none)


FORMATS: tuple[ForeignFormat, ...] = (_OfTorch(),)
