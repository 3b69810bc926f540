"""Opens the checkpoint store at a path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from stagereg.base.providers import needs, providers
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.local_files import FILE_URL, local_path
from stagereg.errors import ConfigError


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL other than a ``file://`` URL."""
    return isinstance(path, str) and "://" in path and not path.startswith(FILE_URL)


def open_store(dir: str | os.PathLike[str]) -> CheckpointStore:
    """Return the checkpoint store at a path or URL, without I/O. Raises the errors of :func:`backend_of`."""
    return CheckpointStore(backend_of(dir))


def backend_of(path: str | os.PathLike[str]) -> Backend:
    """Return the backend for a path or URL, without I/O. Raises ``ConfigError`` if the path or URL is unsupported."""
    if not (isinstance(path, str) and is_url(path)):
        return Directory(local_path(path))
    for each in providers("backends"):
        backend: Backend | None = each.backend(path)
        if backend is not None:
            return backend
    raise ConfigError(f"{path} is a URL, which {needs('buckets')}")


def local_part(path: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a path or ``file://`` URL, and ``None`` for any other URL."""
    return None if is_url(path) else local_path(path)


def open_parent_store(checkpoint: str | os.PathLike[str]) -> CheckpointStore:
    """Return the store that contains the given checkpoint or ``latest`` link. Raises: see :func:`backend_of`."""
    if isinstance(checkpoint, str) and is_url(checkpoint):
        above = checkpoint.rstrip("/").rpartition("/")[0]
        return open_store(above if above.partition("://")[2].strip("/") else checkpoint)
    return open_store(local_path(checkpoint).parent)


def path_or_url(path: str) -> Path | str:
    """Convert a path string from a store to a ``Path``. A URL is returned unchanged."""
    return path if is_url(path) else Path(path)
