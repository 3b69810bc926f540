"""A prefix of an object store: a checkpoint is committed by its manifest, the object that is written last.

::

    s3://bucket/runs/gpt/
        step-00000100.<token>/         one save; all ranks write straight into it
            .metadata  __0_0.distcp …
            manifest.json              there, written by one request: the checkpoint is complete
        latest                         an object with the name of the directory that was committed last

A store cannot rename, so nothing is written under another name than its last. A directory without a manifest is being
written, or is what a killed run left; readers pass it by. The order makes every moment safe to be killed in: the files;
their sizes are looked at; the manifest; ``latest``, replaced by one request; and only then are old checkpoints deleted,
each beginning with its manifest, so that half a checkpoint is never a complete one. A step that is saved again is a new
directory, and the old one goes after the commit. What follows the manifest is made up for by the next save, or the next
start, where it fails.

Nothing outside ``root`` is listed or deleted, and below it only directories that are named as above.
"""

from __future__ import annotations

import contextlib
import logging
import re

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.damage import Condition, Found, Unclear
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import Owner, StoreLock
from stagereg.checkpoint.manifest import LATEST, MANIFEST, FileMark, Manifest, file_mark, step_name
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore, look, nothing_known
from stagereg.checkpoint.store.lease import StoreLease, leaseholder
from stagereg.checkpoint.store.object_store import ObjectStore
from stagereg.checkpoint.store.retry import within
from stagereg.errors import CheckpointError

__all__ = ["RemoteStore"]

_NAME = re.compile(r"step-(?P<step>\d+)(?P<token>\.[0-9a-f]+)?", re.ASCII)
_BEST_EFFORT_S = 10.0

_log = logging.getLogger(__name__)


class RemoteStore(CheckpointStore):
    """A prefix of an object store.

    Args:
        root: its URL. Raises ``ConfigError`` as :class:`.ObjectStore` does.
    """

    remote = True

    def __init__(self, root: str) -> None:
        super().__init__(root.rstrip("/"))
        self.objects = ObjectStore(root)
        self._committed = ""

    def condition(self, path: str) -> Condition:
        path = path.rstrip("/")
        try:
            folder, _, name = path.rpartition("/")
            if name == LATEST:
                path = f"{folder}/{self._name_in(path) or LATEST}"
            return self._look(path, self.objects.sizes(path))
        except OSError as error:
            return nothing_known(path, Unclear(f"cannot be looked at ({error.strerror or error})"))

    def holder(self) -> Owner | None:
        return leaseholder(self.objects, self.root)

    def leftovers(self) -> list[str]:
        # A name without a token is not ours, and its owner may want it.
        ours = (name for name, sizes in self._steps().items() if MANIFEST not in sizes and "." in name)
        return sorted(f"{self.root}/{name}" for name in ours)

    def _conditions(self) -> list[Condition]:
        return [self._look(f"{self.root}/{name}", sizes) for name, sizes in self._steps().items()]

    def _look(self, path: str, sizes: dict[str, int]) -> Condition:
        named = _NAME.fullmatch(path.rpartition("/")[2])
        step = None if named is None else int(named["step"])
        return look(path, step, lambda name: sizes.get(name, "missing"), lambda: self.objects.get(f"{path}/{MANIFEST}"))

    def _steps(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the objects in each step directory."""
        steps: dict[str, dict[str, int]] = {}
        for path, size in self.objects.sizes(self.root, "step-").items():
            folder, _, name = path.partition("/")
            if name and _NAME.fullmatch(folder):
                steps.setdefault(folder, {})[name] = size
        return steps

    def _read_mark(self, path: str, name: str) -> Found:
        return self.mark(path, name)

    def _pointed(self) -> str | None:
        return self._name_in(f"{self.root}/{LATEST}")

    def _name_in(self, latest: str) -> str | None:
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            name = self.objects.get(latest).decode().strip()
            return name if _NAME.fullmatch(name) else None
        return None

    # -- writing

    def lock(self) -> StoreLock:
        """See :class:`.CheckpointStore`. The bucket has to be there."""
        self.objects.make_directory(self.root)
        self._hold = StoreLease(self.objects, self.root)
        return self._hold

    def sweep(self) -> None:
        super().sweep()
        self.objects.abort_uploads(f"{self.root}/step-")

    def temporary(self, step: int, token: str) -> str:
        return f"{self.root}/{step_name(step)}.{token}"

    def files(self, written: str) -> list[str]:
        return list(self.objects.sizes(written))

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        self.objects.put(f"{written}/{name}", data)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileMark:
        """See :class:`.CheckpointStore`. What was written is safely stored already."""
        with self.objects.open(f"{written}/{name}") as stream:
            return file_mark(stream)

    def discard(self, path: str) -> None:
        """See :class:`.CheckpointStore`. The manifest goes first; unfinished multipart uploads go too.

        What was published stays: another rank may have died since, and the checkpoints before it may be deleted.
        """
        if path == self._committed:
            return
        try:
            with within(_BEST_EFFORT_S):
                self._delete(path)
        except OSError as error:
            _log.warning("%s could not be deleted, which the next start will do: %s", path, error)
        else:
            self.objects.abort_uploads(f"{path}/")

    def _commit(self, written: str, manifest: Manifest) -> tuple[str, list[str]]:
        sizes = self.objects.sizes(written)
        for name, expected in manifest.files.items():
            if sizes.get(name) != expected.bytes:
                there = "is missing" if name not in sizes else f"has {sizes[name]} bytes instead of {expected.bytes}"
                raise CheckpointError(f"{written} did not reach the store as it was written: {name} {there}")
        self.objects.put(f"{written}/{MANIFEST}", manifest.dumps().encode())
        self._committed = written
        self.objects.abort_uploads(f"{written}/")
        return written, []

    def _point(self, name: str) -> None:
        self.objects.put(f"{self.root}/{LATEST}", name.encode())

    def _delete(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder != self.root or not _NAME.fullmatch(name):
            raise CheckpointError(f"{path} is no checkpoint in {self.root}; nothing was deleted.")
        self.objects.delete(f"{path}/{MANIFEST}")
        failpoint("hidden")
        self.objects.delete_below(path)
