"""A checkpoint store: a directory of checkpoints, and how one is committed there; docs/checkpoints.md shows its files.

Two kinds of calls. *Reading*: any process, any rank, at any time, and no lock is needed; what another process writes
meanwhile is either seen complete or not at all, and :meth:`CheckpointStore.reading` keeps it from being deleted.
*Writing*: the run that holds the lock, and of that rank 0 alone,
except for :meth:`CheckpointStore.files` and :meth:`CheckpointStore.mark`, with which each rank looks after its own
files.

The order of calls of one run: :meth:`CheckpointStore.lock` and :meth:`CheckpointStore.sweep` once; then for each save
:meth:`CheckpointStore.temporary`, the storage writes there, :meth:`CheckpointStore.files` and
:meth:`CheckpointStore.mark`, and then :meth:`CheckpointStore.publish`, or :meth:`CheckpointStore.discard` where
something has failed.

The order within :meth:`CheckpointStore.publish` makes every moment safe to be killed in: the sizes of the written files
are looked at; the manifest is written beside them; one step, the renaming of the directory, makes a checkpoint of them;
``latest`` moves by another one; and only then are old checkpoints deleted. Nothing is overwritten: a step that is saved
again gets a directory with a token in its name, and the old one goes after the commit. Then the files are linked under
the plain name as well, ``latest`` moves there, and the name with the token goes as an old checkpoint does: when nobody
reads it. Where somebody reads the old one, that comes with a later commit, or with :meth:`CheckpointStore.settle`. What
follows the commit is made up for by the next save, or the next start, where it fails.

Reading follows no link: a file of a checkpoint is a regular file inside its directory, or there is no checkpoint.
Paths are full paths, or URLs, as text. Errors of the file system are ``OSError`` unless said otherwise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, Condition, Found, Unclear, differences, of_error
from stagereg.checkpoint.format.manifest import (
    KEPT,
    LATEST,
    MANIFEST,
    METRICS,
    RESTORED,
    SWEEP_JOB,
    Checkpoint,
    FileMark,
    Manifest,
    metrics_from_json,
    metrics_to_json,
    new_token,
    plain_name,
    step_name,
    step_of,
)
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.lease import LEASE_S, LeaseRecord
from stagereg.checkpoint.store.local_files import local_path, mark_file, sync
from stagereg.checkpoint.store.lock import LOCK, Owner, StoreLock, holder
from stagereg.checkpoint.store.reader_lease import being_read, hold, reader_name
from stagereg.errors import CheckpointError, nearest

_LEFTOVER = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
_NOTE_LEFTOVERS = {f".{name}.tmp" for name in (KEPT, METRICS, RESTORED, SWEEP_JOB)}
_MANIFEST_BYTES = 1 << 28
"""What is longer is not read: with some hundred bytes for each file, that is far more than any run writes."""


_log = logging.getLogger(__name__)


class CheckpointStore:
    """A directory of checkpoints in a file system, shared ones included; :class:`.RemoteStore` is one in a store.

    Args:
        root: its full path, see :func:`local_path`.

    Attributes:
        root: its full path or URL, as messages name it; without a slash at its end.
        appears_as: what :meth:`publish` renames a hidden ``root`` to; empty where that is not hidden.
        distrusted: full paths of checkpoints that look complete and were found to be damaged, or given up after
            crashes, which retention neither counts nor deletes; whoever finds them adds them.
        spared: full paths of checkpoints that were there at the start, which retention neither counts nor deletes
            before the run has come to their step; cleared by whoever knows that the run goes on from them.
        serials: of the manifests that there are beside the last one committed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self.appears_as = ""
        self.distrusted: set[str] = set()
        self.spared: set[str] = set()
        self.serials: set[int] = set()
        self._hold: StoreLock | None = None
        self._out_of_sight: list[str] = []
        self._again: set[int] = set()  # steps that this run has saved where they were already
        self._leases: dict[tuple[str, LeaseRecord], float] = {}  # of readers, and since when they have not changed
        self._late: dict[int, dict[str, float]] | None = None  # metrics by serial, once they are read
        self._late_text = ""  # as they are on the disk
        self._warned: set[str] = set()
        self._explains = True  # whether there is a file that says why checkpoints are kept, or may be

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], list[Condition]]:
        """Return the complete checkpoints, newest first, and the other step directories, the highest step first.

        Complete by manifest and sizes; no content is read. A store that does not exist has none, and what
        :meth:`leftovers` names is not in it.
        """
        found = self._conditions()
        damaged = sorted((each for each in found if each.damages), key=lambda each: each.path, reverse=True)
        return _complete(found), damaged

    def condition(self, path: str) -> Condition:
        """Return what is wrong with one checkpoint by its manifest and the sizes; no content is read.

        Args:
            path: of a checkpoint's directory, or of a ``latest`` that points to one; need not lie in this store. The
                path in the result is that of the directory.
        """
        try:
            return _settled(lambda: [self._look(self._resolve(path))])[0]
        except OSError as error:
            return Condition(path, None, {MANIFEST: Unclear(f"cannot be looked at ({error})")})

    def contents(self, path: str, parts: Mapping[str, range]) -> dict[str, Found]:
        """Read these bytes of files of the checkpoint in the directory ``path``, and return what was found, by name.

        :func:`.damage.differences` compares whole files with the manifest, and :func:`.file_shares.marks_of_shares`
        puts them together of parts. Any rank.
        """
        try:
            sizes = self._sizes(path)
        except OSError as error:
            return dict.fromkeys(parts, of_error(error))
        found: dict[str, Found] = {}
        for name, part in parts.items():
            there = sizes.get(name, "missing")
            try:
                found[name] = self._mark(f"{path}/{name}", part) if isinstance(there, int) else there
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
        every = dict.fromkeys(condition.manifest.files, WHOLE)
        wrong = differences(condition.manifest, self.contents(condition.path, every))
        if wrong and self.condition(path).manifest != condition.manifest:
            return self.examine(path)
        return Condition(condition.path, condition.manifest, wrong)

    @contextlib.contextmanager
    def reading(self, path: str) -> Generator[None, None, None]:
        """Keep a checkpoint from being deleted while the block runs, if it is complete when the block begins.

        In the block, look first whether it still is. Any process, any thread, also while a run writes there; without
        the right to write in its directory, nothing is kept. :mod:`.store.reader_lease` has the details.

        Args:
            path: as :meth:`condition` has it.
        """
        folder, _, name = self._resolve(path).rpartition("/")
        with contextlib.ExitStack() as held:
            if step_of(name) is not None:
                held.enter_context(hold(f"{folder}/{reader_name(name)}", self._write, self._unlink))
            yield

    def readers(self) -> dict[str, list[LeaseRecord]]:
        """Return the leases of those who read checkpoints, by the names of these.

        Those of processes of this machine that have ended are not among them, nor those that have not changed for a
        minute since this object has seen them first. The run that writes here deletes these.
        """
        now, there = time.monotonic(), [name for name in self._listing(self.root) if being_read(name)]
        self._leases = {each: self._leases.get(each, now) for each in map(self._lease, there)}
        found: dict[str, list[LeaseRecord]] = {}
        for (name, record), since in self._leases.items():
            if not record.is_orphaned() and now <= since + LEASE_S:
                found.setdefault(being_read(name) or "", []).append(record)
            elif self._hold is not None:
                self._unlink(f"{self.root}/{name}")
        return found

    def kept(self) -> dict[str, str]:
        """Return why the last save has kept checkpoints, by their names; nothing where all are simply the newest."""
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            read = json.loads(self._read(f"{self.root}/{KEPT}"))
            return {name: why for name, why in read.items() if isinstance(why, str) and why.isprintable()}
        return {}

    def path_of(self, checkpoint: Checkpoint) -> str | None:
        """Return where a checkpoint of this store is now, by its manifest and the sizes; ``None`` if it is gone.

        That is its path, or the plain name that it has got since.
        """
        folder, _, name = checkpoint.path.rpartition("/")
        for path in (checkpoint.path, f"{folder}/{plain_name(name)}"):
            found = self.condition(path)
            if found.manifest == checkpoint.manifest and not found.damages:
                return path
        return None

    def latest(self) -> Checkpoint | None:
        """Return what ``latest`` points to; ``None`` if that is nothing, or not complete."""
        return self.condition(f"{self.root}/{LATEST}").checkpoint

    def metrics_of(self, manifest: Manifest) -> dict[str, float]:
        """Return what rank 0 has logged about the step of a checkpoint of this store, after its manifest too.

        The file with what came after is read once; a store that is written to knows it as it is.
        """
        return {**manifest.metrics, **self._late_metrics().get(manifest.serial, {})}

    def holder(self) -> Owner | None:
        """Return who writes here at this moment, or ``None``; neither waits nor locks."""
        return holder(self.root)

    def leftovers(self) -> list[str]:
        """Return the full paths of what is half-written, be it of a dead run or of one that is writing now."""
        return sorted(f"{self.root}/{name}" for name in self._listing(self.root) if _LEFTOVER.fullmatch(name))

    def note(self, name: str) -> bytes:
        """Return a small file of the directory itself; empty if it is not there."""
        try:
            return self._read(f"{self.root}/{name}")
        except FileNotFoundError:
            return b""

    # -- writing

    def hide(self) -> None:
        """Have a store that is not there yet appear with its first checkpoint; before :meth:`lock`, on all ranks."""
        folder, _, name = self.root.rpartition("/")
        self.root, self.appears_as = f"{folder}/.{name}.tmp", self.root

    def appeared(self) -> None:
        """Note that a hidden store has its first checkpoint; on all ranks, after :meth:`publish`."""
        if self.appears_as:
            self.root, self.appears_as = self.appears_as, ""

    def lock(self) -> StoreLock:
        """Lock the store, which is made if it is not there, until the lock is released; before :meth:`sweep`.

        So no other run writes there, and :meth:`publish` makes sure that it is still held.

        Raises:
            CheckpointError: another run holds it, which the message names. ``OSError``: nothing can be written there.
        """
        os.makedirs(self.root, exist_ok=True)
        self._hold = StoreLock(self.root)
        return self._hold

    def sweep(self) -> None:
        """Delete what killed runs left half-written, and bring to its end what one of them had begun."""
        if self.appears_as:
            begun = [f"{self.root}/{name}" for name in self._listing(self.root) if name != LOCK]
        else:
            begun = self.leftovers()
            begun += [f"{self.root}/{name}" for name in _NOTE_LEFTOVERS & self._listing(self.root).keys()]
        for path in begun:
            self.discard(path)
        self.abort_uploads()
        self.readers()  # deletes leases of processes that have ended
        complete, damaged = self.checkpoints()
        self.spared = {each.path for each in complete}
        # One that points to what is damaged stays as it is: that the newest is lost must not go unnoticed.
        if complete and self._pointed() not in [complete[0].name, *(each.name for each in damaged)]:
            self._point(complete[0].name)  # its run was killed right after the commit

    def abort_uploads(self) -> None:
        """Have a store forget what killed runs have sent in part; nothing in a directory. While the lock is held."""

    def write_note(self, name: str, data: bytes) -> None:
        """Write or replace a small file of the directory itself in one step, safely stored; delete it if empty."""
        if data:
            self._replace(name, data)
        else:
            self._unlink(f"{self.root}/{name}")

    def temporary(self, step: int, token: str) -> str:
        """Return the full path of the directory in which all ranks write one save; makes nothing.

        Args:
            step: the training step.
            token: distinguishes this save from all others (:func:`.manifest.new_token`); the same on all ranks.
        """
        return f"{self.root}/.{step_name(step)}.{token}.tmp"

    def files(self, written: str) -> list[str]:
        """Return the names of the files in the directory ``written``, in no order. Any rank."""
        return list(self._sizes(written))

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        """Write one file into the directory ``written``, have it safely stored, and return its mark."""
        self._write(f"{written}/{name}", data)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileMark:
        """Have one file in the directory ``written`` safely stored, read it back, and return its mark. Any rank."""
        sync(Path(written) / name)
        return self._mark(f"{written}/{name}")

    def note_metrics(self, late: Mapping[int, Mapping[str, float]]) -> None:
        """Take what was logged after a manifest, by its serial; :meth:`write_metrics` writes it."""
        for serial, metrics in late.items():
            self._late_metrics().setdefault(serial, {}).update(metrics)

    def write_metrics(self) -> None:
        """Replace the file of what was logged after manifests, if there is something new; in one step."""
        text = json.dumps({serial: metrics_to_json(each) for serial, each in self._late_metrics().items()}, indent=1)
        if text != (self._late_text or "{}"):
            self._replace(METRICS, f"{text}\n".encode())
            self._late_text = text

    def publish(
        self,
        written: str,
        step: int,
        world_size: int,
        storage: str,
        files: dict[str, FileMark],
        keep: int | Keep,
        metrics: Mapping[str, float] | None = None,
    ) -> Checkpoint:
        """Commit the checkpoint in ``written``, and have :meth:`clear` delete what is not to be kept.

        Args:
            written: what :meth:`temporary` named; all of its files are written and safely stored.
            step: the training step.
            world_size: how many ranks wrote it.
            storage: what it was written through, for its manifest.
            files: the mark of every file in ``written``.
            keep: which complete checkpoints stay, or how many of the newest.
            metrics: what rank 0 has logged about the step so far.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: a file does not have its mark.
        """
        if self._hold is not None:
            self._hold.check()
        failpoint("held")
        before = self._conditions()
        serials = [each.manifest.serial for each in before if each.manifest is not None]  # damaged ones count as well
        serial, seconds = 1 + max(serials, default=0), int(time.time())
        manifest = Manifest(step, world_size, serial, files, storage, seconds, dict(metrics or {}))
        policy = Keep.of(keep)
        lost = Condition(written, manifest, differences(manifest, self._sizes(written)))
        if lost.damages:
            raise CheckpointError(f"{written} did not reach the disk or the store as it was written: {lost}")
        self._write(f"{written}/{MANIFEST}", manifest.dumps().encode())
        path = self._commit(written, step)
        try:  # the checkpoint is complete, so the save must not fail
            failpoint("committed")
            try:
                self._point(path.rpartition("/")[2])
                failpoint("pointed")
            finally:  # or a file system without links would fill up
                why, old = self._retention(before, Checkpoint(path, manifest), policy)
                stay = self._remove(before, old)
                self.serials = {each.manifest.serial for each in stay if each.manifest is not None}
            for each in self._late_metrics().keys() - self.serials:
                del self._late_metrics()[each]
            self.write_metrics()
            plain = self._use_plain_names([*stay, Condition(path, manifest)])
            path = plain.get(path, path)
            self._explain({plain.get(kept, kept): text for kept, text in why.items()})
        except Exception as error:
            text = (
                "stagereg: step %d is saved in %s, but not all that follows is done (moving `latest`, deleting old "
                "checkpoints); the next save makes up for it: %s"
            )
            _log.warning(text, step, path, error)
        if self.appears_as:
            os.rename(self.root, self.appears_as)
            if self._hold is not None:
                self._hold.moved(self.appears_as)
            self.appeared()
            sync(Path(self.root).parent)
            path = f"{self.root}/{os.path.basename(path)}"
        failpoint("retained")
        return Checkpoint(path, manifest)

    def settle(self) -> None:
        """Give steps that this run has saved again their plain names, where somebody has read the old one until now.

        Before the lock is released. Raises nothing.
        """
        try:
            if self._again and self._hold is not None:
                self._hold.check()
                found = [each for each in self._conditions() if each.step in self._again]
                plain = self._use_plain_names(self._remove(found, _replaced(found, self._trusted(found))))
                if why := {f"{self.root}/{name}": text for name, text in self.kept().items()}:
                    self._explain({plain.get(kept, kept): text for kept, text in why.items()})
                self.clear()
        except Exception as error:
            _log.warning("stagereg: not every step in %s has its plain name: %s", self.root, error)

    def clear(self) -> None:
        """Delete what is no longer kept; it is out of sight already."""
        while self._out_of_sight:
            self.discard(self._out_of_sight.pop())

    def discard(self, path: str) -> None:
        """Delete a directory or file of the store; what cannot be deleted stays and does no harm."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    # -- what is otherwise in an object store

    def _listing(self, path: str) -> dict[str, int | str | None]:
        """Return what is in a directory: sizes of files, or what is wrong with one; None of directories."""
        try:
            with os.scandir(path) as entries:
                return {entry.name: _size(entry) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):  # anything else must not look like an empty store
            return {}

    def _resolve(self, path: str) -> str:
        """Return the directory that a path means, which may be that of ``latest``."""
        return os.path.realpath(local_path(path))

    def _read(self, path: str) -> bytes:
        """Read a small file."""
        return Path(path).read_bytes()

    def _mark(self, path: str, part: range = WHOLE) -> FileMark:
        """Read a file to its end, or a part of it."""
        return mark_file(Path(path), part)

    def _write(self, path: str, data: bytes) -> None:
        """Write a small file, and have it safely stored."""
        Path(path).write_bytes(data)
        sync(Path(path))

    def _replace(self, name: str, data: bytes) -> None:
        """Write a small file of the store itself in one step."""
        beside = f"{self.root}/.{name}.tmp"
        self._write(beside, data)
        os.replace(beside, f"{self.root}/{name}")
        sync(Path(self.root))

    def _commit(self, written: str, step: int) -> str:
        """Make a checkpoint of ``written``, which has its manifest, in one step; return its path."""
        sync(Path(written))
        failpoint("described")
        final = f"{self.root}/{step_name(step)}"
        if os.path.lexists(final):
            final = f"{self.root}/{os.path.basename(written)[1:].removesuffix('.tmp')}"
            self._again.add(step)
        os.rename(written, final)
        failpoint("renamed")
        try:
            sync(Path(self.root))
        except OSError:
            with contextlib.suppress(OSError):  # as far as it can be undone where the disk fails
                os.rename(final, written)
            raise
        return final

    def _point(self, name: str) -> None:
        """Let ``latest`` point to a directory, in one step."""
        link = Path(self._hidden(name))
        link.symlink_to(name)
        link.replace(f"{self.root}/{LATEST}")
        sync(Path(self.root))

    def _hide(self, path: str) -> str:
        """Make a checkpoint one that is not complete, in one step, and return where it is now, to be discarded."""
        hidden = self._hidden(os.path.basename(path))
        os.rename(path, hidden)
        failpoint("hidden")
        return hidden

    def _show(self, hidden: str, path: str, manifest: Manifest) -> None:
        """Undo :meth:`_hide`."""
        os.rename(hidden, path)

    def _unlink(self, path: str) -> None:
        """Delete a small file, if it is there."""
        Path(path).unlink(missing_ok=True)

    # -- common to them

    def _pointed(self) -> str:
        """Return the name of the directory that ``latest`` points to, itself where it points to none."""
        return self._resolve(f"{self.root}/{LATEST}").rpartition("/")[2]

    def _sizes(self, path: str) -> dict[str, int | str]:
        """Return the size of each file in a directory, or what it is instead."""
        there = self._listing(path).items()
        return {name: "no regular file" if size is None else size for name, size in there}

    def _conditions(self) -> list[Condition]:
        """Return what each step directory is like by its manifest and sizes."""

        def look() -> list[Condition]:
            there = self._listing(self.root).items()
            names = [name for name, size in there if size is None and step_of(name) is not None]
            return [self._look(f"{self.root}/{name}") for name in names]

        return _settled(look)

    def _look(self, path: str) -> Condition:
        try:
            sizes = self._sizes(path)
        except OSError as error:
            sizes = {MANIFEST: Unclear(f"cannot be looked at ({error})")}
        found = self._manifest(path, sizes.get(MANIFEST, "missing"))
        if isinstance(found, str):
            return Condition(path, None, {MANIFEST: found})
        return Condition(path, found, differences(found, sizes))

    def _lease(self, name: str) -> tuple[str, LeaseRecord]:
        with contextlib.suppress(OSError):
            return name, LeaseRecord.loads(self._read(f"{self.root}/{name}"))
        return name, LeaseRecord()

    def _remove(self, before: list[Condition], old: Collection[str]) -> list[Condition]:
        """Take those of the paths ``old`` out of sight that nobody reads; return what stays of ``before``.

        What ``latest`` points to stays as well.
        """
        read, stay = self.readers() if old else {}, []
        old = {*old} - {f"{self.root}/{self._pointed()}"} if old else old
        for each in before:
            if each.path not in old or each.name in read:
                stay.append(each)
                continue
            hidden = self._hide(each.path)
            if each.manifest is not None and each.name in self.readers():  # by now
                self._show(hidden, each.path, each.manifest)
                stay.append(each)
                continue
            self._out_of_sight.append(hidden)
            if each.damages or each.path in self.distrusted:
                self.distrusted.discard(each.path)
                text = "stagereg: the bad checkpoint %s is replaced: step %d was saved again."
                _log.warning(text, each.path, each.step)
        return stay

    def _use_plain_names(self, there: list[Condition]) -> dict[str, str]:
        """Give steps that were saved again their plain names, if these are free; return the new paths by the old ones.

        By links, so that ``latest``, and who reads, finds a whole checkpoint at each moment and under either name.
        """
        found: dict[str, str] = {}
        for each in self._trusted(there):  # of a step the one committed last comes first
            plain = f"{self.root}/{plain_name(each.name)}"
            if os.path.lexists(plain):
                continue
            beside = self._hidden(each.name)
            try:
                os.mkdir(beside)
                for name in (*each.manifest.files, MANIFEST):
                    os.link(f"{each.path}/{name}", f"{beside}/{name}")
            except OSError as error:
                self.discard(beside)
                self._warn_once(f"steps that are saved again keep a token in their names in {self.root}: {error}")
                continue
            sync(Path(beside))
            os.rename(beside, plain)
            sync(Path(self.root))
            failpoint("named")
            if self._pointed() == each.name:
                self._point(plain_name(each.name))
                failpoint("repointed")
            self._remove([Condition(each.path, each.manifest)], [each.path])
            found[each.path] = plain
        return found

    def _trusted(self, found: list[Condition]) -> list[Checkpoint]:
        """Return the complete ones but those that are distrusted, the one committed last first."""
        return [each for each in _complete(found) if each.path not in self.distrusted]

    def _manifest(self, path: str, there: int | str) -> Manifest | str:
        """Return the manifest in a directory, of which a listing says ``there``, or what is wrong with it."""
        if isinstance(there, str):
            return there
        if there > _MANIFEST_BYTES:
            return f"damaged (it has {there:,} bytes)"
        try:
            manifest = Manifest.loads(self._read(f"{path}/{MANIFEST}"))
        except OSError as error:
            return of_error(error)
        except ValueError as error:
            return f"damaged ({error})"
        named = step_of(path.rpartition("/")[2])
        return manifest if named in (None, manifest.step) else f"of step {manifest.step}, not of this one"

    def _late_metrics(self) -> dict[int, dict[str, float]]:
        if self._late is None:
            self._late = {}
            try:
                self._late_text = self._read(f"{self.root}/{METRICS}").decode().strip()
                read = json.loads(self._late_text)
                self._late = {int(serial): metrics_from_json(metrics) for serial, metrics in read.items()}
            except FileNotFoundError:
                pass
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                _log.warning("stagereg: %s/%s is passed over: %s", self.root, METRICS, error)
        return self._late

    def _hidden(self, name: str) -> str:
        """Return a name that the next start deletes."""
        return f"{self.root}/.{name.partition('.')[0]}.{new_token()}.tmp"

    def _retention(
        self, before: list[Condition], made: Checkpoint, keep: Keep
    ) -> tuple[dict[str, str], Collection[str]]:
        """Return why checkpoints are kept, and the paths of those that are not.

        Nor are those of ``before`` whose step was saved again.
        """
        step = made.manifest.step
        self.distrusted.discard(made.path)
        spared = self.spared & {each.path for each in before if each.step is not None and each.step > step}
        trusted = self._trusted(before)
        replaced = _replaced(before, trusted) - spared | {each.path for each in before if each.step == step}
        counted = [each for each in trusted if each.path not in replaced | spared]
        metrics = {each.path: self.metrics_of(each.manifest) for each in [made, *counted]}
        self._warn_of_policy(keep, made, metrics)
        why = keep.kept([made, *counted], metrics)
        old = {each.path for each in counted} - why.keys() | replaced
        why |= dict.fromkeys(spared, "earlier run")
        return why, old

    def _warn_of_policy(self, keep: Keep, made: Checkpoint, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Warn, once, of a policy that cannot do what it is for."""
        lacks = not any(keep.metric in known for known in metrics.values())
        if keep.metric is not None and lacks and len(metrics) > keep.newest:
            near = nearest(keep.metric, {name for known in metrics.values() for name in known})
            self._warn_once(
                f"no checkpoint in {self.root} has the metric {keep.metric!r}, so checkpoint.keep.best keeps none. Log "
                f"it on rank 0: stagereg.log(step, {keep.metric}=...).{near}"
            )
        if keep.budget is not None and made.manifest.nbytes > keep.budget:
            self._warn_once(
                f"one checkpoint in {self.root} has {made.manifest.nbytes:,} bytes, more than "
                f"checkpoint.keep.budget={keep.budget}, so the newest one alone is kept."
            )

    def _explain(self, why: Mapping[str, str]) -> None:
        """Write why the checkpoints at these paths are kept, where that is not simply since they are the newest."""
        if set(why.values()) != {"newest"}:
            names = {os.path.basename(path): text for path, text in why.items()}
            self._replace(KEPT, json.dumps(names, indent=1).encode())
            self._explains = True
        elif self._explains:
            self._unlink(f"{self.root}/{KEPT}")
            self._explains = False

    def _warn_once(self, text: str) -> None:
        subject = text.partition(" in ")[0]
        if subject not in self._warned:
            self._warned.add(subject)
            _log.warning("stagereg: %s", text)


def _settled(look: Callable[[], list[Condition]]) -> list[Condition]:
    """Look until what is damaged stays so: a run may have deleted it meanwhile, or moved ``latest``."""
    found = look()
    while any(each.damages for each in found) and (again := look()) != found:
        found = again
    return found


def _complete(found: list[Condition]) -> list[Checkpoint]:
    """Return those that are complete, the one committed last first; one that has two names by its plain one."""
    complete = [each.checkpoint for each in found if each.checkpoint is not None]
    complete.sort(key=lambda each: (each.manifest.order, -len(each.name)))
    return [*{each.key: each for each in complete}.values()][::-1]


def _replaced(found: list[Condition], by: list[Checkpoint]) -> set[str]:
    """Return the paths of those of which ``by``, the newest first, has a later one of the same step."""
    last: dict[int | None, Checkpoint] = {each.manifest.step: each for each in reversed(by)}

    def is_older(each: Condition, than: Checkpoint) -> bool:
        if each.manifest is None:  # a name has a token where the plain one was taken
            return each.name == plain_name(than.name)
        return each.path != than.path and each.manifest.order <= than.manifest.order

    return {each.path for each in found if each.step in last and is_older(each, last[each.step])}


def _size(entry: os.DirEntry[str]) -> int | str | None:
    try:
        if entry.is_dir():  # mostly known without another look
            return None
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        return of_error(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else "no regular file"
