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
import time
from collections.abc import Iterable, Iterator, Sequence

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.damage import Condition, Damage, Found, Unclear, differences, of_error
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import Owner, StoreLock
from stagereg.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_BYTES,
    Checkpoint,
    FileMark,
    Manifest,
    file_mark,
    new_token,
    newest_first,
    step_name,
)
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
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
        root: its URL.

    Raises:
        ConfigError: as :class:`.ObjectStore` raises it.
    """

    remote = True

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root.rstrip("/")
        self.objects = ObjectStore(root)
        self._committed = ""

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], dict[str, str]]:
        """See :class:`.CheckpointStore`."""
        every = self._conditions()
        complete = [found.checkpoint for found in every if found.checkpoint is not None]
        return newest_first(complete), {found.path: str(found) for found in every if found.damages}

    def condition(self, path: str) -> Condition:
        """See :class:`.CheckpointStore`."""
        path = path.rstrip("/")
        try:
            if path.endswith(f"/{LATEST}"):
                name = self._pointed(path)
                if name is None:
                    return Condition(path, None, (Damage(LATEST, "points to no checkpoint"),))
                path = f"{path.rpartition('/')[0]}/{name}"
            return self._look(path, self.objects.sizes(path))
        except OSError as error:
            return _unknown(path, Unclear(f"cannot be looked at ({error.strerror or error})"))

    def contents(self, path: str, names: Iterable[str]) -> dict[str, Found]:
        """See :class:`.CheckpointStore`."""
        return {name: self._content(path, name) for name in names}

    def latest(self) -> Checkpoint | None:
        """See :class:`.CheckpointStore`."""
        found = self.open(f"{self.root}/{LATEST}")
        return found if isinstance(found, Checkpoint) else None

    def holder(self) -> Owner | None:
        """See :class:`.CheckpointStore`."""
        return leaseholder(self.objects, self.root)

    def leftovers(self) -> list[str]:
        """See :class:`.CheckpointStore`."""
        return sorted(f"{self.root}/{name}" for name in self._unfinished(self._steps()))

    # -- writing

    def probe(self) -> None:
        """See :class:`.CheckpointStore`. The bucket has to be there."""
        self.objects.make_directory(self.root)
        trial = f"{self.root}/.probe.{new_token()}"
        self.objects.put(trial, b"")
        self.objects.delete(trial)

    def lock(self) -> StoreLock:
        """See :class:`.CheckpointStore`."""
        self._hold = StoreLease(self.objects, self.root)
        return self._hold

    def sweep(self) -> None:
        """See :class:`.CheckpointStore`. ``latest`` is brought up to the last commit."""
        steps = self._steps()
        for name in self._unfinished(steps):
            self.discard(f"{self.root}/{name}")
        self.objects.abort_uploads(f"{self.root}/step-")
        complete, refused = self.checkpoints()
        pointed = self._pointed(f"{self.root}/{LATEST}")
        # One that points to what is damaged stays as it is: that the newest is lost must not go unnoticed.
        if complete and pointed != complete[0].name and f"{self.root}/{pointed}" not in refused:
            self.objects.put(f"{self.root}/{LATEST}", complete[0].name.encode())

    def temporary(self, step: int, token: str) -> str:
        """See :class:`.CheckpointStore`."""
        return f"{self.root}/{step_name(step)}.{token}"

    def files(self, written: str) -> list[str]:
        """See :class:`.CheckpointStore`."""
        return list(self.objects.sizes(written))

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        """See :class:`.CheckpointStore`."""
        self.objects.put(f"{written}/{name}", data)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileMark:
        """See :class:`.CheckpointStore`."""
        with self.objects.open(f"{written}/{name}") as stream:
            return file_mark(stream)

    def publish(
        self, written: str, step: int, world_size: int, storage: str, files: dict[str, FileMark], keep: int
    ) -> str:
        """See :class:`.CheckpointStore`."""
        if self._hold is not None:
            self._hold.check()
        failpoint("held")
        before = [each for each in self._conditions() if each.path != written]
        known = [each.manifest for each in before if each.manifest is not None]  # damaged ones count as well
        serial = 1 + max((each.serial for each in known), default=0)
        manifest = Manifest(step, world_size, serial, files, storage, int(time.time()))
        sizes = self.objects.sizes(written)
        for name, expected in files.items():
            if sizes.get(name) != expected.bytes:
                there = "is missing" if name not in sizes else f"has {sizes[name]} bytes instead of {expected.bytes}"
                raise CheckpointError(f"{written} did not reach the store as it was written: {name} {there}")
        self.objects.put(f"{written}/{MANIFEST}", manifest.dumps().encode())
        self._committed = written
        failpoint("committed")
        try:
            self.objects.put(f"{self.root}/{LATEST}", written.rpartition("/")[2].encode())
            failpoint("pointed")
            self._retain(before, step, keep)
            self.objects.abort_uploads(f"{written}/")
        except Exception as error:
            _log.warning("Step %d is saved; what follows is left to the next save: %s", step, error)
        failpoint("retained")
        return written

    def discard(self, path: str) -> None:
        """See :class:`.CheckpointStore`. The manifest goes first; unfinished multipart uploads go too.

        What was published stays: another rank may have died since, and the checkpoints before it may be deleted.
        """
        if not self._is_ours(path):
            raise CheckpointError(f"{path} is no checkpoint in {self.root}; nothing was deleted.")
        if path == self._committed:
            return
        try:
            with within(_BEST_EFFORT_S):
                self._delete(path)
        except Exception as error:
            _log.warning("%s could not be deleted, which the next start will do: %s", path, error)
        else:
            self.objects.abort_uploads(f"{path}/")

    def _retain(self, before: Sequence[Condition], step: int, keep: int) -> None:
        """Delete of what there was ``before`` a commit what the new checkpoint replaces, and what is too old."""
        replaced = [each.path for each in before if _step_of(each.path) == step]
        for each in before:
            if each.path in replaced and (each.damages or each.path in self.distrusted):
                _log.warning(
                    "stagereg: the damaged checkpoint %s is replaced: step %d was saved again.", each.path, step
                )
        complete = newest_first([each.checkpoint for each in before if each.checkpoint is not None])
        counted = [each.path for each in complete if each.path not in {*replaced, *self.distrusted}]
        for path in (*counted[keep - 1 :], *replaced):
            self._delete(path)
            self.distrusted.discard(path)

    def _delete(self, path: str) -> None:
        assert self._is_ours(path), path
        self.objects.delete(f"{path}/{MANIFEST}")
        failpoint("hidden")
        self.objects.delete_below(path)

    def _is_ours(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return folder == self.root and _NAME.fullmatch(name) is not None

    def _conditions(self) -> list[Condition]:
        """Return what each step directory is like by its manifest and sizes."""
        return [self._look(f"{self.root}/{name}", sizes) for name, sizes in self._steps().items()]

    def _steps(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the objects in each step directory."""
        steps: dict[str, dict[str, int]] = {}
        for path, size in self.objects.sizes(self.root, "step-").items():
            folder, _, name = path.partition("/")
            if name and _NAME.fullmatch(folder):
                steps.setdefault(folder, {})[name] = size
        return steps

    def _unfinished(self, steps: dict[str, dict[str, int]]) -> Iterator[str]:
        """Yield what is no checkpoint yet; a name without a token is not ours, and its owner may want it."""
        for name, sizes in steps.items():
            named = _NAME.fullmatch(name)
            if MANIFEST not in sizes and named is not None and named["token"]:
                yield name

    def _pointed(self, latest: str) -> str | None:
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            name = self.objects.get(latest).decode().strip()
            return name if _NAME.fullmatch(name) else None
        return None

    def _look(self, path: str, sizes: dict[str, int]) -> Condition:
        if MANIFEST not in sizes:
            return _unknown(path, "missing")
        if sizes[MANIFEST] > MANIFEST_BYTES:
            return _unknown(path, f"damaged (it has {sizes[MANIFEST]:,} bytes)")
        try:
            manifest = Manifest.loads(self.objects.get(f"{path}/{MANIFEST}"))
        except OSError as error:
            return _unknown(path, of_error(error))
        except ValueError as error:
            return _unknown(path, f"damaged ({error})")
        if _step_of(path) not in (None, manifest.step):
            return _unknown(path, f"of step {manifest.step}, not of this one")
        found: dict[str, Found] = {name: sizes.get(name, "missing") for name in manifest.files}
        return Condition(path, manifest, differences(manifest, found))

    def _content(self, path: str, name: str) -> Found:
        try:
            return self.mark(path, name)
        except OSError as error:
            return of_error(error)


def _unknown(path: str, what: str | Unclear) -> Condition:
    damage = Damage(MANIFEST, what) if isinstance(what, str) else Damage(MANIFEST, what.why, certain=False)
    return Condition(path, None, (damage,))


def _step_of(path: str) -> int | None:
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return None if found is None else int(found["step"])
