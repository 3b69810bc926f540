"""A prefix of an object store: a checkpoint is committed by its manifest, the object that is written last.

``latest`` is an object with the name of the directory that was committed last; docs/checkpoints.md shows all of them. A
store cannot rename, so nothing is written under another name than its last, and each name has the token of its save. A
directory without a manifest is being written, or is what a killed run left; readers pass it by. A checkpoint that is
deleted loses its manifest first.

Nothing outside ``root`` is listed or deleted, and below it only directories that are named ``step-00000100.<token>``.
"""

from __future__ import annotations

import contextlib
import logging

from stagereg.checkpoint.format.damage import WHOLE, Condition
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, FileMark, Manifest, file_mark, step_name, step_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lease import StoreLease, leaseholder
from stagereg.checkpoint.store.lock import Owner, StoreLock
from stagereg.checkpoint.store.object_store import ObjectStore
from stagereg.checkpoint.store.retry import within
from stagereg.errors import CheckpointError

_BEST_EFFORT_S = 10.0

_log = logging.getLogger(__name__)


class RemoteStore(CheckpointStore):
    """A prefix of an object store.

    Args:
        root: its URL. Raises ``ConfigError`` as :class:`.ObjectStore` does.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root.rstrip("/"))
        self.objects = ObjectStore(root)
        self._committed = ""

    def holder(self) -> Owner | None:
        return leaseholder(self.objects, self.root)

    def leftovers(self) -> list[str]:
        return sorted(each.path for each in super()._conditions() if _is_unfinished(each))

    def _conditions(self) -> list[Condition]:
        return [each for each in super()._conditions() if not _is_unfinished(each)]

    def _listing(self, path: str) -> dict[str, int | str | None]:
        return {**self.objects.listing(path)}

    def _resolve(self, path: str) -> str:
        folder, _, name = path.rstrip("/").rpartition("/")
        if name == LATEST:
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                there = self.objects.get(f"{folder}/{name}").decode().strip()
                name = name if step_of(there) is None else there
        return f"{folder}/{name}"

    def _read(self, path: str) -> bytes:
        return self.objects.get(path)

    def _mark(self, path: str, part: range = WHOLE) -> FileMark:
        with self.objects.open(path) as stream:
            stream.seek(part.start)
            return file_mark(stream, len(part))

    # -- writing

    def lock(self) -> StoreLock:
        """See :class:`.CheckpointStore`. The bucket has to be there."""
        self.objects.make_directory(self.root)
        self._hold = StoreLease(self.objects, self.root)
        return self._hold

    def abort_uploads(self) -> None:
        """See :class:`.CheckpointStore`. Of objects in directories of steps; raises nothing."""
        try:
            with within(_BEST_EFFORT_S):
                self.objects.abort_uploads(self.root, lambda name: step_of(name.partition("/")[0]) is not None)
        except Exception as error:
            _log.warning(
                "stagereg: parts of uploads that killed runs have left in %s are not cleared away, and are paid for; a "
                "lifecycle rule of the bucket does it (AbortIncompleteMultipartUpload): %s",
                self.root,
                error,
            )

    def temporary(self, step: int, token: str) -> str:
        return f"{self.root}/{step_name(step)}.{token}"

    def mark(self, written: str, name: str) -> FileMark:
        """See :class:`.CheckpointStore`. What was written is safely stored already."""
        return self._mark(f"{written}/{name}")

    def discard(self, path: str) -> None:
        """See :class:`.CheckpointStore`. The manifest goes first.

        What was published stays: another rank may have died since, and the checkpoints before it may be deleted.
        """
        if path == self._committed:
            return
        try:
            with within(_BEST_EFFORT_S):
                self._hide(path)
                self.objects.delete_below(path)
        except OSError as error:
            _log.warning("%s could not be deleted, which the next start will do: %s", path, error)

    def _write(self, path: str, data: bytes) -> None:
        self.objects.put(path, data)

    def _replace(self, name: str, data: bytes) -> None:
        self.objects.put(f"{self.root}/{name}", data)

    def _commit(self, written: str, step: int) -> str:
        self._committed = written
        return written

    def _point(self, name: str) -> None:
        self.objects.put(f"{self.root}/{LATEST}", name.encode())

    def _hide(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        if folder != self.root or step_of(name) is None:
            raise CheckpointError(f"{path} is no checkpoint in {self.root}; nothing was deleted.")
        self.objects.delete(f"{path}/{MANIFEST}")
        failpoint("hidden")
        return path

    def _use_plain_names(self, there: list[Condition]) -> dict[str, str]:
        return {}

    def _show(self, hidden: str, path: str, manifest: Manifest) -> None:
        self._write(f"{path}/{MANIFEST}", manifest.dumps().encode())

    def _unlink(self, path: str) -> None:
        self.objects.delete(path)


def _is_unfinished(each: Condition) -> bool:
    """Whether a directory has no manifest; a name without a token is not ours, and its owner may want it."""
    return each.damages == {MANIFEST: "missing"} and "." in each.name
