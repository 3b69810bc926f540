"""The checkpoint store of a path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.directory import Directory
from stagereg.checkpoint.store.local_files import FILE_URL, local_path


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the URL of something that is not in this machine's file systems."""
    return isinstance(path, str) and "://" in path and not path.startswith(FILE_URL)


def open_store(dir: str | os.PathLike[str]) -> CheckpointStore:
    """Return the store of a path or URL; touches neither disk nor network. Raises: ``ConfigError``."""
    if isinstance(dir, str) and is_url(dir):
        from stagereg.extensions.buckets.bucket import Bucket

        return CheckpointStore(Bucket(dir))
    return CheckpointStore(Directory(local_path(dir)))


def open_parent_store(checkpoint: str | os.PathLike[str]) -> CheckpointStore:
    """Return the store that the directory of one checkpoint, or a ``latest``, lies in. Raises as :func:`open_store`."""
    if isinstance(checkpoint, str) and is_url(checkpoint):
        above = checkpoint.rstrip("/").rpartition("/")[0]
        return open_store(above if above.partition("://")[2].strip("/") else checkpoint)
    return open_store(local_path(checkpoint).parent)


def path_or_url(path: str) -> Path | str:
    """Return a path of a store as users get it: a ``Path``, or a URL as it is."""
    return path if is_url(path) else Path(path)
