"""Access object stores through fsspec, with retries (:mod:`.retry`).

An object is identified by its URL; a directory is a common prefix of URLs. Cached listings are not used, since other
processes write to the store too.
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
# Stores without directories. There, creating a directory needs more permissions than writing an object.
_FLAT = {*_S3, "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "obs", "tos", "memory"}


class ObjectStore:
    """The object store of a URL. Thread-safe. fsspec reads credentials and endpoints from the environment.

    Raises:
        ConfigError: fsspec does not support the URL, the URL has no bucket, or it contains a password or a wildcard.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.protocol = url.partition("://")[0]
        _check(url, self.protocol)

    @cached_property
    def fs(self) -> Any:
        """The fsspec file system."""
        from fsspec import url_to_fs

        return url_to_fs(self._url)[0]

    @property
    def _fresh(self) -> Any:
        self.fs.invalidate_cache()  # drops cached listings
        return self.fs

    def path(self, url: str) -> str:
        """Return the path of ``url`` in the fsspec file system, without the protocol."""
        return str(self.fs._strip_protocol(url))

    def listing(self, url: str) -> dict[str, int | None]:
        """Map the name of each object directly below ``url`` to its size in bytes, and of a directory to ``None``."""

        def act() -> dict[str, int | None]:
            path = self.path(url)
            try:
                entries = self._fresh.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                self._expect_bucket(path, url)
                return {}
            found = {entry["name"].rstrip("/").removeprefix(path).lstrip("/"): entry for entry in entries}
            found.pop("", None)  # the entry of ``url`` itself
            return {name: None if each["type"] == "directory" else int(each["size"]) for name, each in found.items()}

        return retrying("listing", url, act)

    def _expect_bucket(self, path: str, url: str) -> None:
        """Raise ``CheckpointError`` if the bucket does not exist, so that a mistyped URL does not start a new run."""
        bucket = path.partition("/")[0]
        with contextlib.suppress(PermissionError):  # the credentials may allow only listings of the prefix
            if self.protocol in _FLAT - {"memory"}:
                try:
                    self.fs.info(bucket)
                except FileNotFoundError as error:
                    text = f"The bucket {bucket} of {url} does not exist. Create the bucket, or correct the URL."
                    raise CheckpointError(text) from error

    def size(self, url: str) -> int | None:
        """Return the size of an object in bytes; ``None`` if it does not exist. Uses no listing, which may be stale."""

        def act() -> int | None:
            try:
                return int(self._fresh.size(self.path(url)))
            except FileNotFoundError:
                return None

        return retrying("accessing", url, act)

    def age(self, url: str, probe: str) -> float:
        """Return an object's age in seconds; 0 if unknown. Writes the object ``probe`` to read the store's clock."""
        self.put(probe, b"now")
        try:
            written, now = (retrying("accessing", each, partial(self._modified, each)) for each in (url, probe))
            return max(0.0, (now - written).total_seconds())
        except (FileNotFoundError, NotImplementedError, KeyError, TypeError):
            return 0.0
        finally:
            self.delete(probe)

    def _modified(self, url: str) -> Any:
        return self._fresh.modified(self.path(url))

    def get(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object from ``start`` to ``end``, by default all bytes."""
        return retrying("reading", url, lambda: bytes(self.fs.cat_file(self.path(url), start=start, end=end)))

    def put(self, url: str, data: bytes) -> None:
        """Write or replace an object, in one request if it is smaller than about 100 MB."""
        retrying("writing", url, lambda: self.fs.pipe_file(self.path(url), data))

    def create(self, url: str, data: bytes) -> bool:
        """Create an object, without retries. Return False if it exists; raise NotImplementedError if unsupported."""
        try:
            self.fs.pipe_file(self.path(url), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, OSError) as error:
            if http_error_of(error)[1] == _PRECONDITION_FAILED:  # some stores send a shorter response than s3fs expects
                return False
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise NotImplementedError(f"{self.protocol}:// does not support conditional writes") from error
        return True

    def open(self, url: str) -> io.BufferedReader:
        """Open an object for reading at any offset. The stream caches the last blocks that were read."""
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
        """Abort multipart uploads below ``url`` (S3 only) with keys that ``is_ours`` accepts. Return their URLs."""
        aborted: list[str] = []

        def act() -> None:
            bucket, key, _ = self.fs.split_path(self.path(url))
            below = f"{key}/" if key else ""
            page, marker = {"IsTruncated": True}, dict[str, str]()
            while page["IsTruncated"]:
                page = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=below, **marker)
                for each in page.get("Uploads", []):
                    if is_ours(each["Key"].removeprefix(below)):
                        self.fs.abort_mpu(bucket, each["Key"], each["UploadId"])
                        aborted.append(f"{self.protocol}://{bucket}/{each['Key']}")
                marker = {name: page.get(f"Next{name}") for name in ("KeyMarker", "UploadIdMarker")}

        if self.protocol in _S3:
            retrying("aborting uploads below", url, act)
        return aborted

    def make_directory(self, url: str) -> None:
        """Create a directory, if the store has directories."""
        if self.protocol not in _FLAT:
            retrying("creating", url, lambda: self.fs.makedirs(self.path(url), exist_ok=True))


class Upload:
    """Writes a new object at ``url``. Has the same methods as :class:`.DiskFile`, which writes a local file.

    The object is uploaded in parts of fsspec's part size, so that at most one part is in memory. If a write fails, the
    upload is aborted, because ending the upload would create a truncated object.
    """

    refused = False

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._file: Any = store.fs.open(store.path(url), "wb")

    def write(self, data: memoryview) -> None:
        # Write small pieces: fsspec would copy a large tensor in one piece and keep the copy in memory.
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
                self._file.closed = True  # otherwise the garbage collector would finish the upload


def _check(url: str, protocol: str) -> None:
    import fsspec

    behind = url.partition("://")[2]
    if not behind.strip("/") or (behind.startswith("/") and protocol in _FLAT - {"memory"}):
        raise ConfigError(f"{url} has no bucket name. Write {protocol}://BUCKET/PATH.")
    user, _, below = behind.rpartition("@")
    if ":" in user.partition("/")[0]:
        raise ConfigError(
            f"{protocol}://***@{below} has a password, which messages and logs would show. Remove the password, and "
            f"set FSSPEC_{protocol.upper()}_USERNAME and FSSPEC_{protocol.upper()}_PASSWORD."
        )
    if set(behind) & set("*?[]"):
        raise ConfigError(f"fsspec would treat {url} as a pattern. Choose a URL without *, ? and brackets.")
    try:
        fsspec.get_filesystem_class(protocol or "nothing")
    except ValueError as error:
        known = "a path, s3://bucket/…, gs://bucket/…, abfs://container/…"
        raise ConfigError(f"{url}: fsspec does not support {protocol}://. Use {known}.") from error
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        what = f"pip install './stagereg[{extra}]'" if extra else str(error)
        raise ConfigError(f"{url} needs a package that is not installed: {what}") from error
