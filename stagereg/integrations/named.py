"""Saves checkpoints to paths that a trainer chooses, with a :class:`stagereg.Checkpointer`.

A save to ``DIR/last.ckpt`` first writes into ``DIR/.stagereg``. When the checkpoint is complete, an atomic rename moves
it to ``DIR/last.ckpt/step-00000007``; the number counts the saves to ``DIR``. The previous checkpoint in
``DIR/last.ckpt`` is then deleted; if a process still reads it, a later save deletes it. Lightning requires that a path
exists immediately, so a new path is a symbolic link into ``/proc`` until the checkpoint is complete. Before a directory
is deleted, it is renamed, so a half-deleted directory does not look like a checkpoint. Only rank 0 changes paths.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import stagereg
from stagereg.assembly import Checkpointer, Preemption
from stagereg.base.small_files import sync
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, METADATA
from stagereg.checkpoint.hold import SCRATCH
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError, kind_of, printable
from stagereg.integrations.written import exchange

_log = logging.getLogger(__name__)

STORE = ".stagereg"
_STEPS = "step-*"
_NUMBER = re.compile(r"step-(\d{8,})(\.[0-9a-f]+)?")
_PLACEHOLDER = re.compile(r"/proc/\d+/comm")
# Name prefixes of read leases, half-deleted checkpoints, files of running proofs, NFS leftovers.
_BESIDE = (".reading.", ".step-", ".prove-", ".nfs")
_ALL = 10**9  # the checkpointer deletes no checkpoint itself, because each one is moved out of its directory


class NamedCheckpoints:
    """Saves checkpoints to paths in one directory. The constructor is collective.

    If this process already has an open instance for the directory, for example from another trainer, the constructor
    closes that instance. ``parent``: the real path of the directory, which is created if necessary. ``is_first``:
    whether this is rank 0. ``options``: options of :class:`stagereg.Checkpointer`. ``replaces_files``: whether a save
    may replace a file or link at its path, and a new path is a link until the checkpoint is complete.
    """

    _open: ClassVar[dict[str, NamedCheckpoints]] = {}

    def __init__(self, parent: str, is_first: bool, options: Mapping[str, Any], *, replaces_files: bool = True) -> None:
        if parent in self._open:
            self._open[parent].close()
        self.parent = parent
        self._parent, self._is_first, self._replaces_files = Path(parent), is_first, replaces_files
        self._store = self._parent / STORE
        if self._store.is_symlink():
            raise ConfigError(f"{self._store} is a link, but must be a directory made by stagereg. Delete the link.")
        options = {"preemption": Preemption(grace_period=None), "save_last": False, **options}
        self.checkpointer = Checkpointer(str(self._store), keep=_ALL, resume="never", **options)
        self.checkpointer.lock()
        self._stores: dict[Path, CheckpointStore] = {}  # reused, because a store tracks the age of read leases
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # (number of a save, action after the save)
        self._failure: CheckpointError | None = None  # error of moving a checkpoint that no call has raised yet
        self._begun = self._placed = 0
        if is_first:
            latest = self._store / "latest"  # a link whose target name contains the number of the newest save
            self._begun = self._placed = number_of(Path(os.readlink(latest))) if latest.is_symlink() else 0
            for path in _saved_in(self._store):  # checkpoints that a killed run wrote but did not move
                delete(path, self._store)
            self._clear_placeholders()
            self.checkpointer.listen(self._complete)
        self._open[parent] = self

    @property
    def is_open(self) -> bool:
        return self._open.get(str(self._parent)) is self

    @classmethod
    def wait_for_all(cls, agree: Callable[[Callable[[], object]], object]) -> None:
        """Wait for the saves of all open directories. Collective.

        ``agree``: calls its argument on rank 0, and raises any error of the call on all ranks. Raises
        ``CheckpointError`` if a save failed and no earlier call has raised the error.
        """
        for each in list(cls._open.values()):
            each.checkpointer.wait()
            agree(each._raise_failure)

    def begin(self, name: str) -> int:
        """Reserve a number for a save to the path ``name``, and return it for :meth:`save`. Call this on rank 0 only.

        Raises:
            CheckpointError: an earlier checkpoint could not be moved to its path.
            ConfigError: the path is the directory of a Checkpointer, or is a file that must not be replaced.
        """
        self._raise_failure()
        path = self._parent / name
        if os.path.lexists(path / LATEST):
            raise ConfigError(f"{path} contains checkpoints of a Checkpointer. Save to another path, or delete them.")
        if not self._replaces_files:
            if os.path.lexists(path) and not path.is_dir():
                raise ConfigError(f"Cannot save to {path}: it is a file, not a directory. Save to another path.")
        elif not os.path.lexists(path):
            with contextlib.suppress(OSError):  # On a file system without links, the path appears after the save.
                path.symlink_to(f"/proc/{os.getpid()}/comm")
        with self._lock:
            self._begun = 1 + max([self._begun, *map(number_of, path.glob(_STEPS))])
            self._waiting.append((self._begun, partial(self._place, path, self._begun)))
        return self._begun

    def save(self, state: Mapping[str, Any], number: int) -> None:
        """Stage ``state`` for the save ``number`` of :meth:`begin`. Collective. Raises like ``Checkpointer.save``."""
        self.checkpointer.save(number, dict(state))

    def remove(self, name: str) -> None:
        """Delete the path ``name`` after all pending saves are complete. If this fails, the next save tries again."""
        delete_it = partial(delete, self._parent / name, self._store)
        with self._lock:
            if self._placed < self._begun:
                self._waiting.append((self._begun, delete_it))
                return
        delete_it()

    def close(self) -> None:
        """Wait for all saves. Raises ``CheckpointError`` if a save failed and no earlier call has raised the error."""
        if self.is_open:
            del self._open[str(self._parent)]
        try:
            self.checkpointer.close()
        finally:
            self._clear_placeholders()
        self._raise_failure()

    def _clear_placeholders(self) -> None:
        for path in self._parent.iterdir() if self._is_first else ():
            if path.is_symlink() and _PLACEHOLDER.fullmatch(os.readlink(path)):
                path.unlink()

    def _complete(self, number: int) -> None:
        """Run the actions that wait for the save ``number``, in order. Called on the saver thread."""
        try:
            while (action := self._due(number)) is not None:
                action()
                self._waiting.pop(0)  # Keep a failed action in the list, so that the next save repeats it.
        except OSError as error:
            self._failure = CheckpointError(
                f"The checkpoint {self._store}/step-{number:08d} is complete, but a rename or deletion in "
                f"{self._parent} failed: {error}. The next save tries again."
            )

    def _due(self, number: int) -> Callable[[], None] | None:
        with self._lock:
            if self._waiting and self._waiting[0][0] <= number:
                return self._waiting[0][1]
            self._placed = number
            return None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _place(self, path: Path, number: int) -> None:
        made = next((each for each in _saved_in(self._store) if number_of(each) == number), None)
        if made is None:
            return  # This save failed. The caller is running the actions of a later save.
        if path.is_dir() and not path.is_symlink():
            read = self._stores.setdefault(path, open_store(path)).readers.found()
            before = [each for each in _saved_in(path) if each.name not in read]
            made.rename(path / made.name)
            sync(path)
        else:
            hidden = _hidden(self._store)
            hidden.mkdir()
            made.rename(hidden / made.name)
            sync(hidden)
            try:
                if self._replaces_files:
                    before = [exchange(hidden, path)]
                else:
                    hidden.rename(path)  # raises OSError if path exists and is not an empty directory
                    before = []
            except OSError:
                (hidden / made.name).rename(made)  # undo the first rename, so that the next save can repeat both
                raise
            sync(self._parent)
        for each in before:
            delete(each, self._store)


def restore(
    source: str, state: dict[str, Any], agree: Callable[[Callable[[], Any]], Any], is_first: bool, **options: Any
) -> int | None:
    """Restore ``state`` from ``source`` without locking a directory. Return the step, or ``None``. Collective."""
    scratch = agree(lambda: tempfile.mkdtemp(prefix=SCRATCH))
    try:
        reading = Checkpointer(scratch, preemption=Preemption(grace_period=None), **options)
        with contextlib.closing(reading):  # `with reading` would also log the end of a run
            return reading.restore(state, source)
    finally:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def split(path: Any) -> tuple[str, str]:
    """Split ``path`` into the real path of its parent directory, and its name. Raises ``ConfigError`` for a URL."""
    if "://" in str(path):
        raise ConfigError(f"{path} is a URL, but saves rename directories. Save to a file system that all ranks share.")
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.realpath(parent), name


def choose(path: str, verify: bool) -> str | None:
    """Return the directory of a valid checkpoint for a load from ``path``, or ``None`` if stagereg did not write it.

    ``path``: the path of a save, a copy of that path, or the directory of one checkpoint. If its name begins with
    ``last``, and its checkpoints are invalid or missing, return the newest valid checkpoint in the parent directory.
    ``verify``: also compare the checksums of all files.
    """
    there = os.path.realpath(path)
    own = _newest_first(Path(there).glob(_STEPS))
    taken = os.path.exists(there) and not _PLACEHOLDER.fullmatch(there)
    if taken and not own and not os.path.exists(f"{there}/manifest.json"):
        return None
    first: CheckpointError | None = None
    for each in _candidates(path, own or [Path(there)]):
        try:
            stagereg.open_checkpoint(each, verify=verify).close()
        except CheckpointError as error:
            first = first or error
        else:
            if first is not None:
                _log.warning("stagereg: skipped %s: %s. Loading %s instead.", path, first, each)
            return str(each)
    raise kind_of([first] if first else [])(f"{path} cannot be loaded: {first}")


def delete(path: Path, store: Path | None = None) -> None:
    """Delete ``path``. A directory is first moved into ``store``, by default ``.stagereg`` in the parent directory.

    If ``path`` contains files that are not checkpoints, delete only the checkpoints, and log the name of such a file.
    """
    store = store or path.parent / STORE
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif others := _others(path):
        for each in _saved_in(path):
            delete(each, store)
        other = printable(others[0], lines=False)
        _log.warning("stagereg: deleted only the checkpoints in %s, because it also contains %s", path, other)
    else:
        shutil.rmtree(path.rename(_hidden(store)) if store.is_dir() else path)


def _candidates(path: str, own: list[Path]) -> Iterator[Path]:
    yield from own
    if split(path)[1].startswith("last"):
        yield from (each for each in _newest_first(Path(split(path)[0]).glob(f"*/{_STEPS}")) if each not in own)


def _newest_first(found: Iterable[Path]) -> list[Path]:
    return sorted((path for path in found if number_of(path)), key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """Return the step number in the name of a checkpoint directory, or 0 if the name has a different form."""
    found = _NUMBER.fullmatch(path.name)
    return int(found[1]) if found else 0


def newest_in(path: Path) -> Path | None:
    """Return the directory of the newest checkpoint in ``path``, or ``None`` if ``path`` contains no checkpoint."""
    return max(_saved_in(path), key=number_of, default=None)


def _saved_in(path: Path) -> list[Path]:
    """Return the checkpoint directories in ``path``. Links, and directories without a manifest, do not count."""
    found = path.glob(_STEPS)
    return [each for each in found if number_of(each) and not each.is_symlink() and (each / MANIFEST).is_file()]


def _others(path: Path) -> list[str]:
    """Return the names of files in ``path`` that do not belong to a checkpoint."""
    if (path / MANIFEST).is_file() or (path / METADATA).is_file():  # METADATA: torch or a trainer wrote it
        return []
    own = {each.name for each in _saved_in(path)}
    return sorted(name for name in os.listdir(path) if name not in own and not name.startswith(_BESIDE))


def _hidden(store: Path) -> Path:
    return store / f".step-{0:08d}.{secrets.token_hex(8)}.tmp"  # the next run deletes it, if this run is killed
