"""An object store through fsspec, with retries (:mod:`.retry`).

Objects are named by their URLs; a directory is the common beginning of names. Cached listings are not used, since other
processes write too.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.buckets.retry import http_error_of, retrying

_READ_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 22
_BLOCKS_KEPT = 3
_PRECONDITION_FAILED = 412
_S3 = {"s3", "s3a"}
_EXTRAS = {**dict.fromkeys(_S3, "s3"), **dict.fromkeys(("az", "abfs", "abfss"), "azure"), "gs": "gcs", "gcs": "gcs"}
# Stores where a name needs no directory to be made first; making one would ask for rights that writing does not need.
_FLAT = {*_S3, "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "obs", "tos", "memory"}


class ObjectStore:
    """The store that a URL is in. Thread-safe. fsspec takes credentials and endpoints from the environment.

    Raises:
        ConfigError: fsspec cannot open it; it names no bucket, or has a password or a character of a pattern in it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.protocol = url.partition("://")[0]
        _check(url, self.protocol)

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec."""
        from fsspec import url_to_fs

        return url_to_fs(self._url)[0]

    @property
    def _fresh(self) -> Any:
        self.fs.invalidate_cache()  # of listings: other processes write too
        return self.fs

    def path(self, url: str) -> str:
        """Return what fsspec calls ``url``, without its protocol."""
        return str(self.fs._strip_protocol(url))

    def listing(self, url: str) -> dict[str, int | None]:
        """Return what is right below ``url``, which need not be there: sizes of objects, None of directories."""

        def act() -> dict[str, int | None]:
            path = self.path(url)
            try:
                entries = self._fresh.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                self._expect_bucket(path, url)
                return {}
            found = {entry["name"].rstrip("/").removeprefix(path).lstrip("/"): entry for entry in entries}
            found.pop("", None)  # ``url`` itself
            return {name: None if each["type"] == "directory" else int(each["size"]) for name, each in found.items()}

        return retrying("listing", url, act)

    def _expect_bucket(self, path: str, url: str) -> None:
        """Raise if the bucket does not exist: a run with a mistyped URL would start from scratch."""
        bucket = path.partition("/")[0]
        with contextlib.suppress(PermissionError):  # a key may be allowed to list the prefix only
            if self.protocol in _FLAT - {"memory"}:
                try:
                    self.fs.info(bucket)
                except FileNotFoundError as error:
                    raise CheckpointError(
                        f"The bucket {bucket} of {url} does not exist. Create the bucket, or correct the URL."
                    ) from error

    def size(self, url: str) -> int | None:
        """Return the size of an object, None if there is none. Asks for its name, so no late listing hides it."""

        def act() -> int | None:
            try:
                return int(self._fresh.size(self.path(url)))
            except FileNotFoundError:
                return None

        return retrying("looking at", url, act)

    def age(self, url: str, probe: str) -> float:
        """Return the age of an object in seconds, by the store's clock, for which ``probe`` is written; else 0."""
        self.put(probe, b"now")
        try:
            written, now = (retrying("looking at", each, partial(self._modified, each)) for each in (url, probe))
            return max(0.0, (now - written).total_seconds())
        except (FileNotFoundError, NotImplementedError, KeyError, TypeError):
            return 0.0
        finally:
            self.delete(probe)

    def _modified(self, url: str) -> Any:
        return self._fresh.modified(self.path(url))

    def get(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of a small object, or of any the bytes from ``start`` to ``end``."""
        return retrying("reading", url, lambda: bytes(self.fs.cat_file(self.path(url), start=start, end=end)))

    def put(self, url: str, data: bytes) -> None:
        """Write or replace an object, in one request where it is below some 100 MB."""
        retrying("writing", url, lambda: self.fs.pipe_file(self.path(url), data))

    def create(self, url: str, data: bytes) -> bool:
        """Try once to write a new object; return whether. Raises: ``NotImplementedError`` if the store cannot."""
        try:
            self.fs.pipe_file(self.path(url), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, OSError) as error:
            if http_error_of(error)[1] == _PRECONDITION_FAILED:  # some stores send a shorter answer than s3fs expects
                return False
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise NotImplementedError(f"{self.protocol}:// has no conditional write") from error
        return True

    def open(self, url: str) -> io.BufferedReader:
        """Open an object for reading, at any offset; the last few blocks are cached."""
        from fsspec.caching import BlockCache
        from fsspec.spec import AbstractBufferedFile

        path = self.path(url)

        def fetch(start: int, end: int) -> bytes:
            return retrying("reading", url, lambda: bytes(self.fs.cat_file(path, start=start, end=min(end, size))))

        size = retrying("reading", url, lambda: int(self._fresh.size(path)))
        file = AbstractBufferedFile(self.fs, path, "rb", size=size)
        file.cache = BlockCache(_BLOCK_BYTES, fetch, size, _BLOCKS_KEPT)
        return io.BufferedReader(file, _READ_BYTES)

    def delete(self, url: str) -> None:
        """Delete one object, if it is there."""

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(url))

        retrying("deleting", url, act)

    def delete_below(self, url: str) -> None:
        """Delete all objects below ``url``."""

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fresh.rm(self.path(url), recursive=True)

        retrying("deleting", url, act)

    def abort_uploads(self, url: str, is_ours: Callable[[str], bool]) -> list[str]:
        """Abort unfinished multipart uploads below ``url``, on S3 alone, whose names are ours; return their URLs."""
        given_up: list[str] = []

        def act() -> None:
            bucket, key, _ = self.fs.split_path(self.path(url))
            below = f"{key}/" if key else ""
            page, marker = {"IsTruncated": True}, dict[str, str]()
            while page["IsTruncated"]:
                page = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=below, **marker)
                for each in page.get("Uploads", []):
                    if is_ours(each["Key"].removeprefix(below)):
                        self.fs.abort_mpu(bucket, each["Key"], each["UploadId"])
                        given_up.append(f"{self.protocol}://{bucket}/{each['Key']}")
                marker = {name: page.get(f"Next{name}") for name in ("KeyMarker", "UploadIdMarker")}

        if self.protocol in _S3:
            retrying("clearing uploads", url, act)
        return given_up

    def make_directory(self, url: str) -> None:
        """Make a directory, where the store has any."""
        if self.protocol not in _FLAT:
            retrying("making", url, lambda: self.fs.makedirs(self.path(url), exist_ok=True))


class Upload:
    """A new object at ``url``: what :class:`.DiskFile` is in a directory.

    It goes up in parts of the size that fsspec has for that store, so that no more than a part lies in memory. It is
    given up where the writing fails, since an upload that is merely closed would leave half a file under its name.
    """

    refused = False

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._file: Any = store.fs.open(store.path(url), "wb")

    def write(self, data: memoryview) -> None:
        # A large tensor whole would be a part of its own size, and as much memory once more.
        for begin in range(0, len(data), _PIECE_BYTES):
            self._file.write(data[begin : begin + _PIECE_BYTES])
            failpoint("writing")

    def end(self) -> None:
        self._file.close()

    def close(self, whole: bool) -> None:
        if not whole:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True  # or else it would send itself when it is let go of


def _check(url: str, protocol: str) -> None:
    import fsspec

    behind = url.partition("://")[2]
    if not behind.strip("/") or (behind.startswith("/") and protocol in _FLAT - {"memory"}):
        raise ConfigError(f"{url} names no bucket. Write {protocol}://BUCKET/PATH.")
    user, _, below = behind.rpartition("@")
    if ":" in user.partition("/")[0]:
        raise ConfigError(
            f"{protocol}://***@{below} has a password in it, which every message and log would show. Leave it out, and "
            f"set FSSPEC_{protocol.upper()}_USERNAME and FSSPEC_{protocol.upper()}_PASSWORD."
        )
    if set(behind) & set("*?[]"):
        raise ConfigError(f"{url} would be a pattern for fsspec: checkpoints need a name without *, ? and brackets.")
    try:
        fsspec.get_filesystem_class(protocol or "nothing")
    except ValueError as error:
        known = "a path, s3://bucket/…, gs://bucket/…, abfs://container/…"
        raise ConfigError(f"{url}: fsspec knows no {protocol}://. A directory of checkpoints is {known}") from error
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        what = f"pip install './stagereg[{extra}]'" if extra else str(error)
        raise ConfigError(f"{url} needs a package that is not installed: {what}") from error
