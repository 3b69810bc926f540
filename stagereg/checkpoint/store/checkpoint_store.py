"""A checkpoint store: lists the checkpoints, and commits new ones; docs/commit-protocol.md shows its files.

*Reading*: any process may read at any time, without a lock. *Writing*: only rank 0 of the run that holds the lock may
write; each rank calls :meth:`CheckpointStore.mark`. A run calls ``lock`` and ``sweep`` once. For each save it calls
``temporary``, lets the storage write there, and calls ``mark``, ``publish`` and ``retention.clear``, or
``backend.discard`` after an error. It calls ``settle`` at the end.

Paths are full paths or URLs, as text. Methods raise ``OSError`` unless their docstrings name other errors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

import stagereg.checkpoint.store.conditions as conditions
from stagereg.base.small_files import UnfitFileError, warn_skipped
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, Found, InaccessibleFile, VerificationResult, damage_of, differences
from stagereg.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    Checkpoint,
    FileDigest,
    Manifest,
    now,
    step_name,
    step_of,
)
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.foreign import TORCH
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.lock import Owner, StoreLock
from stagereg.checkpoint.store.readers import Readers
from stagereg.checkpoint.store.retention import Retention
from stagereg.errors import CheckpointError

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints below one root, in a file system or an object store; created by :func:`.open_store`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.readers = Readers(backend)
        self.retention = Retention(backend, self.readers)
        self._lock: StoreLock | None = None
        self._serial: int | None = None  # serial of the last commit that this run knows, while it holds the lock
        self._put: dict[str, list[str]] = {}  # files of one save that :meth:`put` wrote, not read back yet

    @property
    def root(self) -> str:
        """The full path or URL for messages, without a slash at its end."""
        return self.backend.root

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], list[VerificationResult]]:
        """Return the complete checkpoints, newest first, and the other step directories, highest step first.

        Only manifests and sizes are checked. Neither list includes :meth:`leftovers` and :meth:`of_torch`.
        """
        found = conditions.conditions(self.backend)
        damaged = sorted((each for each in found if each.damages), key=lambda each: each.path, reverse=True)
        return conditions.complete(found), damaged

    def of_torch(self, every: bool = False) -> list[VerificationResult]:
        """Return the step directories that torch wrote, checked by sizes; with ``every``, directories of any name."""
        return conditions.of_torch(self.backend, every)

    def look(self, path: str, content: bool = False) -> VerificationResult:
        """Check one checkpoint, also one of torch. If it was deleted, the result has no manifest.

        Args:
            path: the directory of a checkpoint, or a ``latest`` that points to one; may be outside of this store.
            content: whether to read all files; otherwise the manifest and the sizes are checked.
        """
        found = conditions.look(self.backend, path)
        if not content or found.manifest is None or found.writer == TORCH:
            return found
        if not found.manifest.files:  # torch wrote it, and its checksums cannot be read
            return found
        wrong = differences(found.manifest, self.contents(found.path, dict.fromkeys(found.manifest.files, WHOLE)))
        if wrong and self.look(found.path).manifest != found.manifest:
            return self.look(path, content=True)
        return dataclasses.replace(found, damages=wrong)

    def contents(self, path: str, parts: Mapping[str, range]) -> dict[str, Found]:
        """Read the ranges ``parts`` of files of a checkpoint, and return their digests or errors by name. Any rank.

        :func:`.damage.differences` compares them with the manifest, after :func:`.damage.marks_of_shares` merges them.
        """
        try:
            sizes = conditions.sizes(self.backend, path, parts)
        except OSError as error:
            return dict.fromkeys(parts, damage_of(error))
        found: dict[str, Found] = {}
        for name, part in parts.items():
            there = sizes.get(name, "missing")
            try:
                found[name] = self.backend.mark(f"{path}/{name}", part) if isinstance(there, int) else there
            except OSError as error:
                found[name] = damage_of(error)
        return found

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that ``latest`` points to; ``None`` if there is no complete checkpoint."""
        return self.look(f"{self.root}/{LATEST}").checkpoint

    def note(self, name: str, needed: bool = False) -> bytes:
        """Return the content of a small file of the root, written by ``backend.replace``; empty if it does not exist.

        A directory or link of that name is skipped with a warning, or raises ``UnfitFileError`` if ``needed``.
        """
        path = f"{self.root}/{name}"
        try:
            return self.backend.read(path)
        except FileNotFoundError:
            return b""
        except UnfitFileError as error:
            if needed:
                raise
            warn_skipped(path, error)
            return b""

    def leftovers(self) -> list[str]:
        """Return the full paths of unfinished saves, of a killed run or of a run that is saving now."""
        return conditions.leftovers(self.backend)

    # -- writing

    def holder(self) -> Owner | None:
        """Return the current owner of the lock, or ``None``. Does not wait or lock."""
        return self.backend.holder()

    def last_serial(self) -> int:
        """Return the serial of the last committed checkpoint, corrupt or not; 0 without checkpoints."""
        complete, damaged = self.checkpoints()
        return _last_serial([*complete, *damaged])

    def lock(self) -> StoreLock:
        """Lock the store, unless it is locked already, and return the lock."""
        if self._lock is None or not self._lock.held:
            self._lock, self._serial = self.backend.lock(), None
            self.retention.check = self._lock.check
        return self._lock

    def sweep(self, but: Collection[str] = ()) -> list[str]:
        """Delete the unfinished saves of killed runs, except ``but``, and finish an interrupted commit.

        The lock must be held. Returns the full paths of the deleted directories.
        """
        left = [path for path in self.leftovers() if path not in but]
        for path in left:
            self.backend.discard(path)
        left += self.backend.tidy()
        self.readers.found(delete=True)
        complete, damaged = self.checkpoints()
        self._serial = _last_serial([*complete, *damaged])
        self.retention.spared = {each.path for each in complete}
        # ``latest`` may keep pointing to a corrupt or deleted checkpoint, so that its loss is reported.
        pointed, names = self.retention.pointed(), [each.name for each in complete]
        is_there = pointed in names or pointed in [each.name for each in damaged]
        is_saved_again = not is_there and step_of(pointed) in map(step_of, names)  # under a name with a token
        if complete and (step_of(pointed) is None or pointed in names[1:] or is_saved_again):
            self.backend.point(complete[0].name)  # the run was killed right after the commit
        return left

    def temporary(self, step: int, token: str) -> str:
        """Return the full path of the directory in which all ranks write one save; creates nothing.

        ``token`` (:func:`.manifest.new_token`) distinguishes this save from others, and is the same on all ranks.
        """
        name = f"{step_name(step)}.{token}"
        return f"{self.root}/{name}" if self.backend.in_place else f"{self.root}/.{name}.tmp"

    def put(self, written: str, name: str, data: bytes) -> FileDigest:
        """Write one file into the directory ``written``, make it durable, and return its digest."""
        self.backend.write(f"{written}/{name}", data)
        self._put = {written: [*self._put.get(written, ()), name]}
        return FileDigest(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileDigest:
        """Make one file in the directory ``written`` durable, read it back, and return its digest. Any rank."""
        return self.backend.mark(f"{written}/{name}", flush=True)

    def publish(self, written: str, manifest: Manifest, keep: int | KeepRule) -> Checkpoint:
        """Commit the checkpoint in ``written``, and hide the checkpoints that are no longer retained.

        The process may be killed between any two of these steps: check the file sizes and the lock; commit; read back
        manifest and index; move ``latest``; hide old checkpoints; give a step that was saved again its plain name. A
        lost lock is detected before the commit, and before each checkpoint is hidden.

        Args:
            written: the path of :meth:`temporary`; all of its files are durable.
            manifest: has the digest of every file in ``written``. This method sets its serial and time.
            keep: the rule for complete checkpoints, or the number of newest checkpoints to retain.

        Raises:
            CheckpointError: a file does not match its digest; the lock is lost; or the committed files do not read back
                as they were written. Earlier checkpoints are not touched.
        """
        self.retention.check()
        before, policy = conditions.conditions(self.backend), Keep.of(keep)
        last = _last_serial(before)
        if self._lock is not None and self._serial is not None and last > self._serial:
            raise CheckpointError(
                f"{self.root} has a checkpoint that another run has committed while this run held the lock. Two runs "
                "must not write there: stop one of them."
            )
        manifest = dataclasses.replace(manifest, serial=1 + last, time=now())
        manifest.expect_readable(written)
        there = conditions.sizes(self.backend, written, manifest.files)
        lost = VerificationResult(written, manifest, differences(manifest, there))
        if lost.damages:
            raise CheckpointError(f"The files in {written} differ from the files that were written: {lost}")
        self.retention.check()
        failpoint("held")
        made = Checkpoint(self.backend.commit(written, manifest), manifest)
        self._serial = manifest.serial
        unclear = self._expect_stored(made, self._put.pop(written, []))
        try:  # the checkpoint is complete, so the save must not fail; the next save or start repeats this
            failpoint("committed")
            self.retention.check()
            if unclear:
                raise OSError(f"cannot read the checkpoint back: {unclear}")
            try:
                self.backend.point(made.name)
                failpoint("pointed")
            finally:  # also without links, otherwise the disk would fill up
                stay = self.retention.retire(before, made, policy)
            made = Checkpoint(self.retention.use_plain_names(stay).get(made.path, made.path), manifest)
        except Exception as error:
            text = (
                "stagereg: Step %d is saved in %s, but moving `latest` or deleting old checkpoints failed. The next "
                "save tries again: %s"
            )
            _log.warning(text, manifest.step, made.path, error)
        failpoint("retained")
        return made

    def _expect_stored(self, made: Checkpoint, put: Sequence[str]) -> str:
        """Raise ``CheckpointError`` if the manifest or the files do not read back as they were committed.

        Return why the check was not possible, or an empty text. Only the files ``put`` are read completely.
        """
        found = conditions.look(self.backend, made.path)
        wrong = {**found.damages} or ({} if found.manifest == made.manifest else {MANIFEST: "another manifest"})
        marks = {name: made.manifest.files[name] for name in put}
        if not wrong:
            there = self.contents(made.path, dict.fromkeys(marks, WHOLE))
            wrong = differences(dataclasses.replace(made.manifest, files=marks), there)
        text = str(VerificationResult(made.path, None, wrong))
        if not all(isinstance(what, InaccessibleFile) for what in wrong.values()):
            self.retention.distrusted.add(made.path)
            raise CheckpointError(
                f"{made.path} does not read back as it was written: {text}. The storage has lost data, so no older "
                "checkpoint was deleted. Check the disk, or save to another directory."
            )
        return text

    def settle(self) -> None:
        """Give steps that were saved again their plain names, if readers have prevented this. Raises nothing."""
        try:
            if self._lock is not None:
                self.retention.settle(self._lock)
        except Exception as error:
            _log.warning("stagereg: Some steps in %s keep a token in their names: %s", self.root, error)


def _last_serial(found: Sequence[Checkpoint | VerificationResult]) -> int:
    """Return the serial of the last committed checkpoint, corrupt or not."""
    return max((each.manifest.serial for each in found if each.manifest is not None), default=0)
