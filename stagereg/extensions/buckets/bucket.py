"""Checkpoints below a prefix of an object store. The manifest commits a checkpoint, so it is written last.

Object stores cannot rename, so the name of each checkpoint's directory permanently contains the random token of its
save: ``step-00000100.<token>``. The object ``latest`` contains the name of the newest directory. A deletion removes the
manifest first. Only directories below ``root`` with names of this form are deleted.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Sequence

from stagereg.base.deadline import within
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, VerificationResult
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, FileDigest, Manifest, step_of
from stagereg.checkpoint.store.backend import Sink, T
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import Owner, StoreLock
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.lease import StoreLease, leaseholder
from stagereg.extensions.buckets.object_store import ObjectStore, Upload
from stagereg.extensions.buckets.retry import answered, retrying

_BEST_EFFORT_S = 10.0
_BLOCK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class StoredFiles:
    """Implements :class:`.Files` for the objects of an object store."""

    remote = shared = True
    root: str
    objects: ObjectStore

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        return retrying(doing, path, act)

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        return answered(self.root, seconds, act, give_back)

    def fetch(self, path: str, part: range) -> bytes:
        return self.objects.get(path, part.start, part.stop)

    def open(self, path: str) -> io.BufferedReader:
        return self.objects.open(path)

    def make(self, path: str) -> None:
        self.objects.make_directory(path)

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        return Upload(self.objects, path)


class Bucket(StoredFiles):
    """Implements :class:`.Backend` for a prefix in an existing bucket of an :class:`.ObjectStore`."""

    in_place = True

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.objects = ObjectStore(root)
        self._committed = ""

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        listed = self.objects.listing(path)
        named = {name: self.objects.size(f"{path}/{name}") for name in files if name not in listed}
        return {**listed, **{name: size for name, size in named.items() if size is not None}}

    def resolve(self, path: str) -> str:
        folder, _, name = path.rstrip("/").rpartition("/")
        if name == LATEST:
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                there = self.read(f"{folder}/{name}").decode().strip()
                name = name if step_of(there) is None else there
        return f"{folder}/{name}"

    def read(self, path: str) -> bytes:
        return self.objects.get(path)

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        with self.objects.open(path) as stream:
            stream.seek(part.start)
            size = crc = 0
            while block := stream.read(min(_BLOCK_BYTES, len(part) - size)):
                size, crc = size + len(block), crc32(block, crc)
            return FileDigest(size, crc)

    def holder(self) -> Owner | None:
        return leaseholder(self.objects, self.root)

    def lock(self) -> StoreLock:
        self.objects.make_directory(self.root)
        return StoreLease(self.objects, self.root)

    def write(self, path: str, data: bytes) -> None:
        self.objects.put(path, data)

    def replace(self, name: str, data: bytes) -> None:
        self.write(f"{self.root}/{name}", data) if data else self.delete(f"{self.root}/{name}")

    def delete(self, path: str) -> None:
        self.objects.delete(path)

    def commit(self, written: str, manifest: Manifest) -> str:
        self.write(f"{written}/{MANIFEST}", manifest.dumps().encode())
        self._committed = written
        return written

    def point(self, name: str) -> None:
        self.replace(LATEST, name.encode())

    def link(self, checkpoint: Checkpoint) -> str:
        return ""

    def hide(self, each: VerificationResult) -> str:
        self._hide(each.path)
        return each.path

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        assert each.manifest is not None
        self.write(f"{hidden}/{MANIFEST}", each.manifest.dumps().encode())

    def discard(self, path: str) -> None:
        if path == self._committed:  # keep a committed checkpoint: older ones may already have been deleted
            return
        try:
            with within(_BEST_EFFORT_S):
                self._hide(path)
                self.objects.delete_below(path)
        except OSError as error:
            _log.warning("Could not delete %s: %s. The next start of the run will delete it.", path, error)

    def tidy(self) -> Sequence[str]:
        try:
            with within(_BEST_EFFORT_S):
                return self.objects.abort_uploads(self.root, lambda name: step_of(name.partition("/")[0]) is not None)
        except Exception as error:
            _log.warning(
                "stagereg: could not abort incomplete multipart uploads of killed runs in %s, which use paid storage. "
                "Add a lifecycle rule to the bucket (AbortIncompleteMultipartUpload). Error: %s",
                self.root,
                error,
            )
            return []

    def _hide(self, path: str) -> None:
        """Delete the manifest of a checkpoint, so that the directory is no longer a checkpoint."""
        folder, _, name = path.rpartition("/")
        if folder != self.root or step_of(name) is None:
            raise CheckpointError(f"{path} is not a checkpoint in {self.root}. Nothing was deleted.")
        self.delete(f"{path}/{MANIFEST}")
        failpoint("hidden")
