"""The checkpoint store of a path or URL."""

from __future__ import annotations

import os
from pathlib import Path

from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.errors import ConfigError

__all__ = ["is_url", "open_parent_store", "open_store", "path_or_url", "store_path"]

_LOCAL = "file://"


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the URL of something that is not in this machine's file systems."""
    return isinstance(path, str) and "://" in path and not path.startswith(_LOCAL)


def open_store(dir: str | os.PathLike[str]) -> CheckpointStore:
    """Return the directory of checkpoints ``dir``: a path, a ``file://`` URL, or another URL that fsspec knows.

    Touches neither disk nor network.

    Raises:
        ConfigError: fsspec does not know the protocol of the URL, or the package for it is not installed.
    """
    if isinstance(dir, str) and is_url(dir):
        from stagereg.checkpoint.store.remote_store import RemoteStore

        return RemoteStore(dir)
    return LocalStore(_plain(dir))


def open_parent_store(checkpoint: str | os.PathLike[str]) -> CheckpointStore:
    """Return the store that the directory of one checkpoint, or a ``latest``, lies in. Raises as :func:`open_store`."""
    if isinstance(checkpoint, str) and is_url(checkpoint):
        above = checkpoint.rstrip("/").rpartition("/")[0]
        return open_store(above if above.partition("://")[2].strip("/") else checkpoint)
    return LocalStore(_plain(checkpoint).absolute().parent)


def store_path(checkpoint: str) -> str:
    """Return ``checkpoint``, as :func:`open_parent_store` takes it, as :meth:`.CheckpointStore.condition` takes it."""
    return checkpoint if is_url(checkpoint) else str(_plain(checkpoint))


def path_or_url(path: str) -> Path | str:
    """Return a path of a store as users get it: a ``Path``, or a URL as it is."""
    return path if is_url(path) else Path(path)


def _plain(path: str | os.PathLike[str]) -> Path:
    if isinstance(path, str) and path.startswith(_LOCAL) and not path.startswith(f"{_LOCAL}/"):
        raise ConfigError(f"{path} names another machine; a directory of this one has three slashes: file:///runs.")
    expanded = os.path.expanduser(os.fspath(path).removeprefix(_LOCAL))
    if expanded.startswith("~"):
        raise ConfigError(f"{path} begins with the home of a user who is not known here; ./{path} is a name.")
    return Path(expanded)
