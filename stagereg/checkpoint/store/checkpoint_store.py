"""A checkpoint store: a directory of checkpoints, local or remote.

Two kinds of calls. *Reading*: any process, any rank, at any time, and no lock is needed; what another process writes
meanwhile is either seen complete or not at all. *Writing*: the run that holds the lock, and of that rank 0 alone,
except for :meth:`CheckpointStore.files` and :meth:`CheckpointStore.mark`, with which each rank looks after its own
files.

The order of calls of one run: :meth:`CheckpointStore.lock` and :meth:`CheckpointStore.sweep` once; then for each save
:meth:`CheckpointStore.temporary`, the storage writes there, :meth:`CheckpointStore.files` and
:meth:`CheckpointStore.mark`, and then :meth:`CheckpointStore.publish`, or :meth:`CheckpointStore.discard` where
something has failed.

The order within :meth:`CheckpointStore.publish` makes every moment safe to be killed in: the sizes of the written files
are looked at; one step makes a checkpoint of them; ``latest`` moves by another one; and only then are old checkpoints
deleted. Nothing is overwritten: a step that is saved again gets a directory with another name, and the old one goes
after the commit. What follows the commit is made up for by the next save, or the next start, where it fails.

Paths are full paths, or URLs, as text. Errors of the file system are ``OSError`` unless said otherwise.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

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
    newest_first,
    step_of,
)
from stagereg.errors import CheckpointError

__all__ = ["CheckpointStore"]

_log = logging.getLogger(__name__)


class CheckpointStore(ABC):
    """A directory of checkpoints.

    Attributes:
        root: its path or URL, as messages name it; without a slash at its end.
        remote: whether ``root`` is a URL.
        distrusted: full paths of checkpoints that look complete and were found to be damaged, which retention neither
            counts nor deletes; whoever reads content adds them.
    """

    remote: bool

    def __init__(self, root: str) -> None:
        self.root = root
        self.distrusted: set[str] = set()
        self._hold: StoreLock | None = None

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], dict[str, str]]:
        """Return the complete checkpoints, newest first, and why each other step directory is none, by its full path.

        Complete by manifest and sizes; no content is read. A store that does not exist has none, and what
        :meth:`leftovers` names is not in it.
        """
        found = self._conditions()
        return _complete(found), {each.path: str(each) for each in found if each.damages}

    def condition(self, path: str) -> Condition:
        """Return what is wrong with one checkpoint by its manifest and the sizes; no content is read.

        Args:
            path: of a checkpoint's directory, or of a ``latest`` that points to one; need not lie in this store. The
                path in the result is that of the directory.
        """
        try:
            found = self._look(self._resolve(path))
            while found.damages and (again := self._look(self._resolve(path))) != found:
                found = again  # a run has deleted it meanwhile, or moved `latest`
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
            return _nothing_known(path, Unclear(f"cannot be looked at ({error})"))
        return found

    def contents(self, path: str, names: Iterable[str]) -> dict[str, Found]:
        """Read files of the checkpoint in the directory ``path`` to their ends, and return what they are, by name.

        :func:`.damage.differences` compares them with the manifest. Any rank.
        """
        found: dict[str, Found] = {}
        try:
            sizes = self._sizes(path)
        except OSError as error:
            return dict.fromkeys(names, of_error(error))
        for name in names:
            there = sizes.get(name, "missing")
            try:
                found[name] = self.mark(path, name, flush=False) if isinstance(there, int) else there
            except OSError as error:
                found[name] = of_error(error)
        return found

    def examine(self, path: str) -> Condition:
        """Return what is wrong with one checkpoint, the content of its files included, which are read one by one.

        Of one that is deleted meanwhile, no manifest is left.
        """
        condition = self.condition(path)
        if condition.manifest is None:
            return condition
        wrong = differences(condition.manifest, self.contents(condition.path, condition.manifest.files))
        if wrong and self.condition(path).manifest != condition.manifest:
            return self.examine(path)
        return Condition(condition.path, condition.manifest, wrong)

    def latest(self) -> Checkpoint | None:
        """Return what ``latest`` points to; ``None`` if that is nothing, or not complete."""
        return self.condition(f"{self.root}/{LATEST}").checkpoint

    @abstractmethod
    def holder(self) -> Owner | None:
        """Return who writes here at this moment, or ``None``; neither waits nor locks."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """Return the full paths of what is half-written, be it of a dead run or of one that is writing now."""

    # -- writing

    @abstractmethod
    def lock(self) -> StoreLock:
        """Lock the store, which is made if it is not there, until the lock is released; before :meth:`sweep`.

        So no other run writes there, and :meth:`publish` makes sure that it is still held.

        Raises:
            CheckpointError: another run holds it, which the message names. ``OSError``: nothing can be written there.
        """

    def sweep(self) -> None:
        """Delete what killed runs left half-written, and bring to its end what one of them had begun."""
        for path in self.leftovers():
            self.discard(path)
        complete, refused = self.checkpoints()
        pointed = self._pointed()
        # One that points to what is damaged stays as it is: that the newest is lost must not go unnoticed.
        if complete and pointed != complete[0].name and f"{self.root}/{pointed}" not in refused:
            self._point(complete[0].name)  # its run was killed right after the commit

    @abstractmethod
    def temporary(self, step: int, token: str) -> str:
        """Return the full path of the directory in which all ranks write one save; makes nothing.

        Args:
            step: the training step.
            token: distinguishes this save from all others (:func:`.manifest.new_token`); the same on all ranks.
        """

    def files(self, written: str) -> list[str]:
        """Return the names of the files in the directory ``written``, in no order. Any rank."""
        return list(self._sizes(written))

    @abstractmethod
    def put(self, written: str, name: str, data: bytes) -> FileMark:
        """Write one file into the directory ``written``, have it safely stored, and return its mark."""

    @abstractmethod
    def mark(self, written: str, name: str, flush: bool = True) -> FileMark:
        """Have one file in the directory ``written`` safely stored, read it back, and return its mark. Any rank.

        Without ``flush`` it is only read.
        """

    def publish(
        self, written: str, step: int, world_size: int, storage: str, files: dict[str, FileMark], keep: int
    ) -> str:
        """Commit the checkpoint in ``written`` and delete all but the ``keep`` newest.

        Args:
            written: what :meth:`temporary` named; all of its files are written and safely stored.
            step: the training step.
            world_size: how many ranks wrote it.
            storage: what it was written through, for its manifest.
            files: the mark of every file in ``written``.
            keep: how many complete checkpoints stay, at least 1.

        Returns:
            The full path of the checkpoint.

        Raises:
            CheckpointError: a file does not have its mark.
        """
        if self._hold is not None:
            self._hold.check()
        failpoint("held")
        before = self._conditions()
        serials = [each.manifest.serial for each in before if each.manifest is not None]  # damaged ones count as well
        manifest = Manifest(step, world_size, 1 + max(serials, default=0), files, storage, int(time.time()))
        lost = Condition(written, manifest, _missing_from(self._sizes(written), manifest))
        if lost.damages:
            raise CheckpointError(f"{written} did not reach the disk or the store as it was written: {lost}")
        path = self._commit(written, manifest)
        try:  # the checkpoint is complete, so the save must not fail
            failpoint("committed")
            try:
                self._point(path.rpartition("/")[2])
                failpoint("pointed")
            finally:  # or a file system without links would fill up
                for old in self._too_old(before, path, step, keep):
                    self._delete(old)
        except Exception as error:
            _log.warning(
                "stagereg: step %d is saved in %s, but not all that follows is done (moving `latest`, deleting old "
                "checkpoints); the next save makes up for it: %s",
                step,
                path,
                error,
            )
        failpoint("retained")
        return path

    @abstractmethod
    def discard(self, path: str) -> None:
        """Delete a directory or file of the store; what cannot be deleted stays and does no harm."""

    # -- what kinds of stores differ in

    @abstractmethod
    def _names(self) -> list[str]:
        """Return the names of the step directories; none if there is no store."""

    @abstractmethod
    def _resolve(self, path: str) -> str:
        """Return the directory that a path means, which may be that of ``latest``."""

    @abstractmethod
    def _sizes(self, path: str) -> dict[str, int | str]:
        """Return the size of each file in a directory, or what it is instead; nothing if there is no directory."""

    @abstractmethod
    def _read(self, path: str) -> bytes:
        """Read a small file."""

    @abstractmethod
    def _commit(self, written: str, manifest: Manifest) -> str:
        """Make a checkpoint of ``written`` in one step; return its path."""

    @abstractmethod
    def _point(self, name: str) -> None:
        """Let ``latest`` point to a directory, in one step."""

    @abstractmethod
    def _pointed(self) -> str | None: ...

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete a checkpoint, in such an order that half of one is never a complete one."""

    # -- common to them

    def _conditions(self) -> list[Condition]:
        """Return what each step directory is like by its manifest and sizes."""
        found = self._look_at_all()
        while any(each.damages for each in found) and (again := self._look_at_all()) != found:
            found = again  # a run has deleted one since they were listed, and a newer one may be there
        return found

    def _look_at_all(self) -> list[Condition]:
        return [self._look(f"{self.root}/{name}") for name in self._names()]

    def _look(self, path: str) -> Condition:
        try:
            sizes = self._sizes(path)
        except OSError as error:
            return _nothing_known(path, Unclear(f"cannot be looked at ({error})"))
        found = sizes.get(MANIFEST, "missing")
        if not isinstance(found, int):
            return _nothing_known(path, found)
        if found > MANIFEST_BYTES:
            return _nothing_known(path, f"damaged (it has {found:,} bytes)")
        try:
            manifest = Manifest.loads(self._read(f"{path}/{MANIFEST}"))
        except OSError as error:
            return _nothing_known(path, of_error(error))
        except ValueError as error:
            return _nothing_known(path, f"damaged ({error})")
        if step_of(path.rpartition("/")[2]) not in (None, manifest.step):
            return _nothing_known(path, f"of step {manifest.step}, not of this one")
        return Condition(path, manifest, _missing_from(sizes, manifest))

    def _too_old(self, before: list[Condition], path: str, step: int, keep: int) -> list[str]:
        """Return what of ``before`` the commit of ``path`` replaces, and what is not to be kept."""
        replaced = {each.path for each in before if each.step == step}
        for each in before:
            if each.path in replaced and (each.damages or each.path in self.distrusted):
                self.distrusted.discard(each.path)
                text = "stagereg: the damaged checkpoint %s is replaced: step %d was saved again."
                _log.warning(text, each.path, step)
        counted = [each.path for each in _complete(before) if each.path not in replaced | self.distrusted]
        pointed = f"{self.root}/{self._pointed()}"
        return [old for old in (*counted[keep - 1 :], *sorted(replaced)) if old not in (path, pointed)]


def _missing_from(sizes: Mapping[str, int | str], manifest: Manifest) -> tuple[Damage, ...]:
    return differences(manifest, {name: sizes.get(name, "missing") for name in manifest.files})


def _nothing_known(path: str, why: str) -> Condition:
    """Return the condition of a directory without a manifest that can be read."""
    return Condition(path, None, (Damage(MANIFEST, why, certain=not isinstance(why, Unclear)),))


def _complete(found: list[Condition]) -> list[Checkpoint]:
    return newest_first([each.checkpoint for each in found if each.checkpoint is not None])
