"""Restores that read each byte of a checkpoint only once for all ranks (:mod:`.shared_read`)."""

from __future__ import annotations

import stagereg.extensions.buckets.shared_read as shared_read
from stagereg.checkpoint.extension import RestoreExtension


class ReadsOnce(RestoreExtension):
    shared_reader = shared_read


EXTENSIONS: tuple[type[RestoreExtension], ...] = (ReadsOnce,)
"""The restore extensions of this package."""
