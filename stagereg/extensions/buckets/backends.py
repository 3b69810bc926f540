"""The backend for all URLs that fsspec supports, for :func:`.backend_of`."""

from __future__ import annotations

from stagereg.checkpoint.store.backend import Backend
from stagereg.extensions.buckets.bucket import Bucket


def backend(url: str) -> Backend | None:
    """Return the backend of a URL, without network access. Raises ``ConfigError`` if fsspec does not support it."""
    return Bucket(url)
