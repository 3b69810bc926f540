"""An object store through fsspec, asked for little and asked again where the network fails.

Objects are named by their URLs. A store has no directories of its own here: what lies below a URL is what has a name
that begins with it. Nothing is taken from a cache of listings, as other processes write too. The rules of :mod:`.retry`
about trials and errors hold for every call.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
from typing import Any

from stagereg.checkpoint.store.retry import answer_of, retrying, within
from stagereg.errors import ConfigError

__all__ = ["ObjectStore"]

_READ_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 23
_BLOCKS_KEPT = 3
_PIECE_BYTES = 1 << 26
_BEST_EFFORT_S = 10.0
_PRECONDITION_FAILED = 412
_EXTRAS = {"s3": "hydra-stagereg[s3]", "s3a": "hydra-stagereg[s3]"}
# Stores where a name needs no directory to be made first; making one would ask for rights that writing does not need.
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "obs", "tos", "memory"}
_PATTERNS = set("*?[]")
_LIST_BY_PREFIX = {"s3", "s3a", "gs", "gcs"}

_log = logging.getLogger(__name__)


class ObjectStore:
    """The store that a URL is in. Can be pickled; any thread may use it.

    Args:
        url: of anything in it. fsspec takes credentials and endpoints from the environment, and from its own
            configuration.

    Raises:
        ConfigError: fsspec does not know the protocol of the URL, or the package for it is not installed; the URL names
            no bucket, or one version of an object, or is a chain, or has a password in it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.protocol = url.partition("://")[0]
        self._known: Any = None
        _check(url, self.protocol)

    def __getstate__(self) -> dict[str, Any]:
        """For a process of its own, which makes connections of its own."""
        return {**vars(self), "_known": None}

    @property
    def fs(self) -> Any:
        """The file system of fsspec."""
        if self._known is None:
            from fsspec.core import url_to_fs

            try:
                self._known, _ = url_to_fs(self._url)
            except ImportError as error:
                raise _missing(self._url, self.protocol, error) from error
        return self._known

    def path(self, url: str) -> str:
        """Return what fsspec calls ``url``, without its protocol."""
        return str(self.fs._strip_protocol(url))

    def sizes(self, url: str, prefix: str = "") -> dict[str, int]:
        """Return the sizes of all objects below ``url``, by what follows ``url`` and a slash in their names.

        Args:
            url: nothing but what lies below it is listed; it need not be there.
            prefix: what the names have to begin with.
        """

        def act() -> dict[str, int]:
            self.fs.invalidate_cache()
            path = self.path(url)
            try:
                found = self._find(path, prefix)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            names = {name.removeprefix(path).lstrip("/"): entry for name, entry in found.items()}
            return {
                name: int(self.fs.size(entry["name"]) or 0) if entry["size"] is None else int(entry["size"])
                for name, entry in names.items()
                if name.startswith(prefix) and name and not name.endswith("/") and entry["type"] == "file"
            }

        return retrying("listing", url, act)

    def get(self, url: str) -> bytes:
        """Return the content of a small object."""
        return retrying("reading", url, lambda: bytes(self.fs.cat_file(self.path(url))))

    def put(self, url: str, data: bytes) -> None:
        """Write or replace an object, in one request where it is below some 100 MB."""
        retrying("writing", url, lambda: self.fs.pipe_file(self.path(url), data))

    def create(self, url: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether it was written.

        One try: where the answer to one is lost, the next one finds the object, which only its content distinguishes
        from another writer's.

        Raises:
            NotImplementedError: this store, or its package, cannot do that in one request.
        """
        try:
            self.fs.pipe_file(self.path(url), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, OSError) as error:
            if answer_of(error)[1] == _PRECONDITION_FAILED:  # some stores send a shorter answer than s3fs expects
                return False
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise NotImplementedError(f"{self.protocol}:// has no conditional write") from error
        return True

    def open(self, url: str) -> io.BufferedReader:
        """Open an object for reading, at any offset."""
        return io.BufferedReader(_Reader(self, url), _READ_BYTES)

    def exists(self, url: str) -> bool:
        """Whether there is an object of that name."""

        def act() -> bool:
            self.fs.invalidate_cache()
            return bool(self.fs.exists(self.path(url)))

        return retrying("looking for", url, act)

    def delete(self, url: str) -> None:
        """Delete one object, if it is there."""

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(url))

        retrying("deleting", url, act)

    def delete_below(self, url: str) -> None:
        """Delete all objects below ``url``."""

        def act() -> None:
            self.fs.invalidate_cache()
            path = self.path(url)
            with contextlib.suppress(FileNotFoundError):
                if not set(path) & _PATTERNS:
                    self.fs.rm(path, recursive=True)
                    return
                # One by one, as fsspec would take the URL for a pattern, and delete what it matches.
                for name in self.fs.find(path):
                    self.fs.rm_file(name)

        retrying("deleting", url, act)

    def make_directory(self, url: str) -> None:
        """Make a directory, where the store has any."""
        if self.protocol not in _FLAT:
            retrying("making", url, lambda: self.fs.makedirs(self.path(url), exist_ok=True))

    def abort_uploads(self, prefix: str) -> None:
        """Give up the multipart uploads of S3 whose names begin with the URL ``prefix``; they are paid for, and hidden.

        Other stores let go of them by themselves. A store that refuses the question is warned of.
        """
        if not hasattr(self.fs, "call_s3"):
            return
        try:
            with within(_BEST_EFFORT_S):
                for upload in retrying("looking for unfinished uploads", prefix, lambda: self._uploads(prefix)):
                    self._abort(prefix, upload)
        except Exception as error:
            _log.warning("Multipart uploads below %s may be left, which cost money: %s", prefix, error)

    def _abort(self, prefix: str, upload: dict[str, str]) -> None:
        bucket = self.fs.split_path(self.path(prefix))[0]

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.call_s3("abort_multipart_upload", Bucket=bucket, **upload)

        retrying("giving up an unfinished upload", prefix, act)

    def _uploads(self, prefix: str) -> list[dict[str, str]]:
        bucket, key, _ = self.fs.split_path(self.path(prefix))
        found: list[dict[str, str]] = []
        more: dict[str, str] = {}
        while True:
            page = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **more)
            uploads = page.get("Uploads", [])
            # Not every S3-compatible store applies the prefix.
            found += [{"Key": u["Key"], "UploadId": u["UploadId"]} for u in uploads if u["Key"].startswith(key)]
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _find(self, path: str, prefix: str) -> dict[str, Any]:
        if self.protocol in _LIST_BY_PREFIX:
            found: dict[str, Any] = self.fs.find(path, detail=True, prefix=prefix)
            return found
        found = {}
        for entry in self.fs.ls(path, detail=True):
            name = entry["name"].rstrip("/")
            if not name.rpartition("/")[2].startswith(prefix) or name == path:
                continue
            found.update(self.fs.find(name, detail=True) if entry["type"] == "directory" else {name: entry})
        return found


class _Reader(io.RawIOBase):
    """One object, of which each byte is asked for once, as far as that is possible.

    Who reads an archive looks at its end, at its beginning, at its end again, and then takes the large record in it at
    once. So little ones come from blocks of which the last few are kept, and large ones as they are asked for.
    """

    def __init__(self, objects: ObjectStore, url: str) -> None:
        super().__init__()
        self._blocks: dict[int, bytes] = {}
        self._objects, self._url = objects, url
        self._path = objects.path(url)
        self._size = retrying("reading", url, lambda: int(objects.fs.size(self._path)))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if self._at >= end:
            return 0
        number, offset = divmod(self._at, _BLOCK_BYTES)
        if number in self._blocks or end - self._at < _BLOCK_BYTES:
            data = memoryview(self._block(number))[offset : offset + end - self._at]
        else:
            known = min((other * _BLOCK_BYTES for other in self._blocks if other > number), default=end)
            data = memoryview(self._fetch(self._at, min(end, known, self._at + _PIECE_BYTES)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        found = self._blocks.pop(number, None)
        if found is None:
            begin = number * _BLOCK_BYTES
            found = self._fetch(begin, min(begin + _BLOCK_BYTES, self._size))
            if len(self._blocks) >= _BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = found  # the one used last is the last one
        return found

    def _fetch(self, begin: int, end: int) -> bytes:
        data: bytes = retrying(
            "reading", self._url, lambda: self._objects.fs.cat_file(self._path, start=begin, end=end)
        )
        if not data:
            raise OSError(errno.EIO, "it has become shorter while it was read", self._url)
        return data


def _check(url: str, protocol: str) -> None:
    import fsspec

    behind = url.partition("://")[2]
    if not behind.strip("/") or (behind.startswith("/") and protocol in _FLAT - {"memory"}):
        raise ConfigError(f"{url} names no bucket, or whatever that is called there; try {protocol}://bucket/runs.")
    host, _, below = behind.partition("/")
    if ":" in host.rpartition("@")[0]:
        hidden = f"{protocol}://***@{host.rpartition('@')[2]}/{below}"
        raise ConfigError(
            f"{hidden} has a password in it, which every message and log would show. Leave it out, and set "
            f"FSSPEC_{protocol.upper()}_USERNAME and FSSPEC_{protocol.upper()}_PASSWORD."
        )
    if "?versionId=" in url and protocol in _EXTRAS:
        raise ConfigError(f"{url} is one version of an object; a directory of checkpoints is s3://bucket/runs.")
    if "::" in url:
        raise ConfigError(f"{url} is a chain of URLs; a directory of checkpoints is one URL, such as s3://bucket/runs.")
    try:
        if not protocol:
            raise ValueError("no protocol")
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        known = "a path, s3://bucket/…, gs://bucket/…, abfs://container/…"
        raise ConfigError(f"{url}: fsspec knows no {protocol}://. A directory of checkpoints is {known}") from error
    except ImportError as error:
        raise _missing(url, protocol, error) from error


def _missing(url: str, protocol: str, error: ImportError) -> ConfigError:
    what = f"pip install '{_EXTRAS[protocol]}'" if protocol in _EXTRAS else str(error)
    return ConfigError(f"{url} needs a package that is not installed: {what}")
