"""Checkpoints at paths that a trainer chooses, written by a :class:`stagereg.Checkpointer`.

A save to ``DIR/last.ckpt`` writes in ``DIR/.stagereg``. One atomic rename moves the complete checkpoint to
``DIR/last.ckpt/step-00000007``, the seventh save to ``DIR``. Then the previous checkpoint at that path is deleted, or
with a later save if a process reads it. For Lightning, a path that does not exist yet is a link to a file of this
process until then: the path counts as taken, and as missing if the process dies. A half-deleted directory does not have
the name of a checkpoint. Rank 0 alone handles paths.
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
_BESIDE = (".reading.", ".step-", ".nfs")  # leases, what is being deleted, files that NFS deletes later
_ALL = 10**9  # checkpoints are kept: none of them stays in the directory that they are written in


class NamedCheckpoints:
    """The checkpoints of one directory, on one rank. Constructing it is collective.

    It closes the one that this process has of the same directory, of another trainer. ``parent`` is a real path, made
    if need be; ``is_first``: whether this is rank 0; ``options`` are those of the :class:`stagereg.Checkpointer`.
    ``replaces_files``: whether a save replaces a file or a link at its path, and makes a link there at once.
    """

    _open: ClassVar[dict[str, NamedCheckpoints]] = {}

    def __init__(self, parent: str, is_first: bool, options: Mapping[str, Any], *, replaces_files: bool = True) -> None:
        if parent in self._open:
            self._open[parent].close()
        self.parent = parent
        self._parent, self._is_first, self._replaces_files = Path(parent), is_first, replaces_files
        self._store = self._parent / STORE
        if self._store.is_symlink():
            raise ConfigError(f"{self._store} is a link, and must be a directory that stagereg made: delete the link.")
        options = {"preemption": Preemption(grace_period=None), "save_last": False, **options}
        self.checkpointer = Checkpointer(str(self._store), keep=_ALL, resume="never", **options)
        self.checkpointer.lock()
        self._stores: dict[Path, CheckpointStore] = {}  # which know since when somebody reads there
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # for the save of that number, or a later one
        self._failure: CheckpointError | None = None  # to move a checkpoint, which no call has raised yet
        self._begun = self._placed = 0
        if is_first:
            latest = self._store / "latest"  # where the last one of all was moved from
            self._begun = self._placed = number_of(Path(os.readlink(latest))) if latest.is_symlink() else 0
            for path in _saved_in(self._store):  # of a run that was killed before it moved them
                delete(path, self._store)
            self._clear_placeholders()
            self.checkpointer.listen(self._complete)
        self._open[parent] = self

    @property
    def is_open(self) -> bool:
        return self._open.get(str(self._parent)) is self

    @classmethod
    def wait_for_all(cls, agree: Callable[[Callable[[], object]], object]) -> None:
        """Wait for the saves of all directories that are open. ``agree`` raises the error of rank 0 on all ranks.

        Raises ``CheckpointError`` if a save failed and no call has raised that yet.
        """
        for each in list(cls._open.values()):
            each.checkpointer.wait()
            agree(each._raise_failure)

    def begin(self, name: str) -> int:
        """Return the number of a save that is to be found under ``name``, for :meth:`save`; on rank 0.

        Raises:
            CheckpointError: an earlier checkpoint could not be moved to its path.
            ConfigError: a Checkpointer saves to that path, or it must not be replaced and is a file.
        """
        self._raise_failure()
        path = self._parent / name
        if os.path.lexists(path / LATEST):
            raise ConfigError(f"{path} has the checkpoints of a Checkpointer: save to another path, or delete them.")
        if not self._replaces_files:
            if os.path.lexists(path) and not path.is_dir():
                raise ConfigError(f"{path} is a file, and must be the path of a directory.")
        elif not os.path.lexists(path):
            with contextlib.suppress(OSError):  # where there are no links it is taken only when the save is complete
                path.symlink_to(f"/proc/{os.getpid()}/comm")
        with self._lock:
            self._begun = 1 + max([self._begun, *map(number_of, path.glob(_STEPS))])
            self._waiting.append((self._begun, partial(self._place, path, self._begun)))
        return self._begun

    def save(self, state: Mapping[str, Any], number: int) -> None:
        """Stage ``state``, on all ranks. Raises as :meth:`stagereg.Checkpointer.save`."""
        self.checkpointer.save(number, dict(state))

    def remove(self, name: str) -> None:
        """Delete what is at ``name`` once what was saved last is in its place; if that fails, once a later save is."""
        delete_it = partial(delete, self._parent / name, self._store)
        with self._lock:
            if self._placed < self._begun:
                self._waiting.append((self._begun, delete_it))
                return
        delete_it()

    def close(self) -> None:
        """Wait for all saves. Raises: ``CheckpointError`` if one has failed and no call has raised that yet."""
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
        """Do what has waited for that save, in order; on the background thread."""
        try:
            while (action := self._due(number)) is not None:
                action()
                self._waiting.pop(0)  # what has failed is done again after the next save
        except OSError as error:
            self._failure = CheckpointError(
                f"A checkpoint is complete in {self._store}/step-{number:08d}, but paths in {self._parent} could not "
                f"be changed: {error}"
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
            return  # it has failed, and a later one has not
        if path.is_dir() and not path.is_symlink():
            read = self._stores.setdefault(path, open_store(path)).readers.found()
            before = [each for each in _saved_in(path) if each.name not in read]
            made.rename(path / made.name)
            sync(path)
        else:
            beside = _hidden(self._store)
            beside.mkdir()
            made.rename(beside / made.name)
            sync(beside)
            try:
                before = self._replace(path, beside)
            except OSError:
                (beside / made.name).rename(made)  # for the next try
                raise
            sync(self._parent)
        for each in before:
            delete(each, self._store)

    def _replace(self, path: Path, beside: Path) -> list[Path]:
        """Give ``beside`` the name ``path``; return the path of the file that had that name."""
        if self._replaces_files:
            return [exchange(beside, path)]
        beside.rename(path)  # fails unless nothing, or an empty directory, is there
        return []


def restore(
    source: str, state: dict[str, Any], agree: Callable[[Callable[[], Any]], Any], is_first: bool, **options: Any
) -> int | None:
    """Load ``source`` as :meth:`stagereg.Checkpointer.restore` does; no lock is taken on any directory. Collective."""
    scratch = agree(lambda: tempfile.mkdtemp(prefix=SCRATCH))
    try:
        reading = Checkpointer(scratch, preemption=Preemption(grace_period=None), **options)
        with contextlib.closing(reading):  # its end is not that of a run, of which there would be something to say
            return reading.restore(state, source)
    finally:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def split(path: Any) -> tuple[str, str]:
    """Return the directory of ``path`` and the name in it. Raises: ``ConfigError`` for a URL."""
    if "://" in str(path):
        raise ConfigError(f"{path} is a URL, where nothing can be renamed. Save to a file system that all ranks see.")
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.realpath(parent), name


def choose(path: str, verify: bool) -> str | None:
    """Return the directory of the checkpoint that is to be read for ``path``; ``None`` if that is not stagereg's.

    ``path`` was saved to, is a copy of that, or the directory of one checkpoint. Where its name begins with ``last``,
    and there is no good checkpoint at it, the newest good one beside it. ``verify``: compare checksums of all files.
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
                _log.warning("stagereg: %s is passed over: %s. Loaded in its place: %s", path, first, each)
            return str(each)
    raise kind_of([first] if first else [])(f"{path} cannot be loaded: {first}")


def delete(path: Path, store: Path | None = None) -> None:
    """Delete what is at ``path``, in ``store`` or the one beside it, so that no half is left under its name.

    Of a directory that has something else, only the checkpoints are deleted, and a warning names the rest.
    """
    store = store or path.parent / STORE
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif others := _others(path):
        for each in _saved_in(path):
            delete(each, store)
        other = printable(others[0], lines=False)
        _log.warning("stagereg: %s was not deleted: %s in it is no part of a checkpoint.", path, other)
    else:
        shutil.rmtree(path.rename(_hidden(store)) if store.is_dir() else path)


def _candidates(path: str, own: list[Path]) -> Iterator[Path]:
    yield from own
    if split(path)[1].startswith("last"):
        beside = _newest_first(Path(split(path)[0]).glob(f"*/{_STEPS}"))
        yield from (each for each in beside if each not in own)


def _newest_first(found: Iterable[Path]) -> list[Path]:
    return sorted((path for path in found if number_of(path)), key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """Return the number in the name of a checkpoint, 0 of anything else."""
    found = _NUMBER.fullmatch(path.name)
    return int(found[1]) if found else 0


def newest_in(path: Path) -> Path | None:
    """Return the directory of the checkpoint that was saved to ``path`` last; ``None`` if there is none."""
    return max(_saved_in(path), key=number_of, default=None)


def _saved_in(path: Path) -> list[Path]:
    """Return the checkpoints in a directory; no links, and nothing that a program gave a like name."""
    found = path.glob(_STEPS)
    return [each for each in found if number_of(each) and not each.is_symlink() and (each / MANIFEST).is_file()]


def _others(path: Path) -> list[str]:
    """Return the names in the directory of checkpoints, or of one checkpoint, ``path`` that are no part of any."""
    if (path / MANIFEST).is_file() or (path / METADATA).is_file():  # METADATA: torch or a trainer wrote it
        return []
    own = {each.name for each in _saved_in(path)}
    return sorted(name for name in os.listdir(path) if name not in own and not name.startswith(_BESIDE))


def _hidden(store: Path) -> Path:
    return store / f".step-{0:08d}.{secrets.token_hex(8)}.tmp"  # what the next run deletes, should this one be killed
