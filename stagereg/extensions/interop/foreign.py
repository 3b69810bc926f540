"""The formats of others that a checkpoint store reads or names; see :class:`.ForeignFormat`."""

from __future__ import annotations

from collections.abc import Mapping

from stagereg.checkpoint.format.damage import VerificationResult
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.foreign import ForeignFormat
from stagereg.extensions.interop import other_formats, torch_directories


class _OfTorch:
    def look(self, backend: Backend, path: str, there: Mapping[str, int | str]) -> VerificationResult:
        return torch_directories.look(backend, path, there)

    def expect_none(self, path: str) -> None:
        other_formats.expect_none(path)


FORMATS: tuple[ForeignFormat, ...] = (_OfTorch(),)
