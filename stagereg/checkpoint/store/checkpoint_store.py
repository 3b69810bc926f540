"""The checkpoint store lists the checkpoints in a directory, and commits new checkpoints.

docs/commit-protocol.md shows the files. *Reading*: any process may read at any time, without a lock. *Writing*: only
rank 0 of the run that holds the lock may write. A run first calls ``lock`` and ``sweep``. For each save it calls
``temporary``; the storage writes its files there; each rank calls ``mark``; rank 0 calls ``publish`` and
``retention.clear``, or ``backend.discard`` after an error. At the end the run calls ``settle``.

Paths are absolute paths or URLs, as strings. Methods raise ``OSError`` unless their docstrings name other errors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

import stagereg.checkpoint.format.manifest as manifests
import stagereg.checkpoint.store.conditions as conditions
from stagereg.base.small_files import UnfitFileError, warn_skipped
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, Found, InaccessibleFile, VerificationResult, damage_of, differences
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, Checkpoint, FileDigest, Manifest, step_name, step_of
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.foreign import TORCH
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.readers import Readers
from stagereg.checkpoint.store.retention import Retention
from stagereg.errors import CheckpointError

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints below one root, in a file system or an object store; created by :func:`.open_store`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.root = backend.root  # absolute path or URL of the checkpoint directory, without a slash at the end
        self.readers = Readers(backend)
        self.retention = Retention(backend, self.readers)
        self._lock: StoreLock | None = None
        self._serial: int | None = None  # number of the last commit that this run has made or found
        self._put: dict[str, list[str]] = {}  # directory of the current save, with the files from :meth:`put`

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], list[VerificationResult]]:
        """Return the complete checkpoints, newest first, and the corrupt checkpoints, highest step first.

        Only manifests and file sizes are checked. Neither list contains :meth:`leftovers` or :meth:`of_torch`.
        """
        found = conditions.conditions(self.backend)
        damaged = sorted((each for each in found if each.damages), key=lambda each: each.path, reverse=True)
        return conditions.complete(found), damaged

    def of_torch(self, every: bool = False) -> list[VerificationResult]:
        """Check the file sizes of plain torch's checkpoints: those named ``step-N``, or all if ``every`` is set."""
        return conditions.of_torch(self.backend, every)

    def look(self, path: str, content: bool = False) -> VerificationResult:
        """Check one checkpoint of stagereg or of plain torch. If it was deleted, the result has no manifest.

        ``path``: the directory of a checkpoint, or a link ``latest``; may be outside of this store. ``content``:
        whether to read all files and compare checksums. Otherwise only manifest and sizes are checked.
        """
        found = conditions.look(self.backend, path)
        if not content or found.writer == TORCH or found.manifest is None or not found.manifest.files:
            return found  # without files, torch wrote it, and its checksums cannot be read
        wrong = differences(found.manifest, self.contents(found.path, dict.fromkeys(found.manifest.files, WHOLE)))
        if wrong and self.look(found.path).manifest != found.manifest:
            return self.look(path, content=True)
        return dataclasses.replace(found, damages=wrong)

    def contents(self, path: str, parts: Mapping[str, range]) -> dict[str, Found]:
        """Read byte ranges of a checkpoint's files, and return the digest or error of each file. Called on any rank.

        The caller merges the digests of all ranges (:func:`.marks_of_shares`), and compares them with the manifest.
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
        """Return the checkpoint that the link ``latest`` points to, or ``None`` if it is missing or incomplete."""
        return self.look(f"{self.root}/{LATEST}").checkpoint

    def note(self, name: str, needed: bool = False) -> bytes:
        """Return the content of a small file in the root directory, or ``b""`` if the file does not exist.

        If it is a directory or a link: raise ``UnfitFileError`` if ``needed``, otherwise warn and return ``b""``.
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
        """Return the paths of unfinished saves. They belong to killed runs, or to a run that is saving now."""
        return conditions.leftovers(self.backend)

    # -- writing

    def last_serial(self) -> int:
        """Return the commit number of the newest checkpoint, even if it is corrupt; 0 without checkpoints."""
        return _last_serial(conditions.conditions(self.backend))

    def lock(self) -> StoreLock:
        """Lock the store, unless this object has locked it already, and return the lock."""
        if self._lock is None or not self._lock.held:
            self._lock, self._serial = self.backend.lock(), None
            self.retention.check = self._lock.check
        return self._lock

    def sweep(self, but: Collection[str] = ()) -> list[str]:
        """Delete the unfinished saves of killed runs, except the paths ``but``, and finish an interrupted commit.

        The caller must hold the lock. Returns the paths of the deleted directories and files.
        """
        left = [path for path in self.leftovers() if path not in but]
        for path in left:
            self.backend.discard(path)
        left += self.backend.tidy()
        self.readers.found(delete=True)
        complete, damaged = self.checkpoints()
        self._serial = _last_serial([*complete, *damaged])
        self.retention.spared = {each.path for each in complete}
        # If ``latest`` points to a corrupt or deleted checkpoint, it stays, so that the next restore reports the error.
        pointed, names = self.retention.pointed(), [each.name for each in complete]
        is_there = pointed in names or pointed in [each.name for each in damaged]
        is_saved_again = not is_there and step_of(pointed) in map(step_of, names)  # its name has a random token
        if complete and (step_of(pointed) is None or pointed in names[1:] or is_saved_again):
            self.backend.point(complete[0].name)  # a run was killed between commit and link update
        return left

    def temporary(self, step: int, token: str) -> str:
        """Return the path of the directory into which all ranks write one save. Does not create the directory.

        ``token`` is a random string from :func:`.new_token` that identifies this save. All ranks use the same token.
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
        """Commit the checkpoint in the directory ``written``, and hide the checkpoints that are no longer retained.

        Check the file sizes and the lock; commit; read back the small files; move the link ``latest``; hide old
        checkpoints; rename a step that was saved again to its name without token. The process may be killed between
        any two of these actions. The lock is checked before the commit, and before each checkpoint is hidden.

        Args:
            written: the path that :meth:`temporary` returned; all files in this directory are durable.
            manifest: contains the digest of every file in ``written``. This method sets commit number and time.
            keep: the retention rule, or the number of newest checkpoints to retain.

        Raises:
            CheckpointError: a file does not match its digest; this run has lost the lock; or the committed files do not
                read back as they were written. Earlier checkpoints are then unchanged.
        """
        self.retention.check()
        before, policy = conditions.conditions(self.backend), Keep.of(keep)
        last = _last_serial(before)
        if self._lock is not None and self._serial is not None and last > self._serial:
            raise CheckpointError(
                f"{self.root} has a checkpoint that another run has committed while this run held the lock. Two runs "
                "must not write there: stop one of them."
            )
        manifest = dataclasses.replace(manifest, serial=1 + last, time=manifests.now())
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
        try:  # after the commit an error must not fail the save; the next save or start repeats these actions
            failpoint("committed")
            self.retention.check()
            if unclear:
                raise OSError(f"cannot read the checkpoint back: {unclear}")
            try:
                self.backend.point(made.name)
                failpoint("pointed")
            finally:  # even if a link cannot be created, because the disk would otherwise fill up
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
        """Raise ``CheckpointError`` if manifest, file sizes, or the content of files in ``put`` are not as committed.

        Return an error message if the files could not be accessed, and ``""`` if they are correct.
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
        """Rename steps that were saved again to their names without token, if no process reads them. Raises nothing."""
        try:
            if self._lock is not None:
                self.retention.settle(self._lock)
        except Exception as error:
            _log.warning("stagereg: Some steps in %s keep names like step-00000060.TOKEN: %s", self.root, error)


def _last_serial(found: Sequence[Checkpoint | VerificationResult]) -> int:
    return max((each.manifest.serial for each in found if each.manifest is not None), default=0)
