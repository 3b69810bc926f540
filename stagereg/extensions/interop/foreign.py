"""The functions for checkpoints of other programs, which :mod:`stagereg.checkpoint.store.foreign` calls."""

from stagereg.extensions.interop.other_formats import expect_none
from stagereg.extensions.interop.torch_directories import look

__all__ = ["expect_none", "look"]
