"""The backend of a URL, for :func:`.backend_of`: whatever fsspec can open."""

from __future__ import annotations

from stagereg.checkpoint.store.backend import Backend
from stagereg.extensions.buckets.bucket import Bucket


def backend(url: str) -> Backend | None:
    """Return the backend of a URL. Touches no network. Raises: ``ConfigError``."""
    return Bucket(url)
