"""Checkpoints under paths that a trainer chooses: a link for each, to a checkpoint of a :class:`stagereg.Checkpointer`.

A trainer has names and an order of its own: ``last.ckpt``, ``epoch=3-val=0.2.ckpt``, the best three. What is saved to
``DIR/last.ckpt`` lies in ``DIR/.stagereg/step-00000007``, the seventh save to ``DIR``, and ``last.ckpt`` is a relative
link, which moves there by one atomic rename when that checkpoint is complete. Until then a path that was there points
to what it pointed to, and a new one to a file of this process: it counts as taken, and as missing if the process dies.
What is removed or replaced goes when the saves before are complete, and what is half-deleted has no checkpoint's name.

Rank 0 alone looks after links; all ranks save.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.opened import open_checkpoint
from stagereg.errors import CheckpointError, ConfigError

__all__ = ["LinkedCheckpoints", "choose", "delete", "split"]

_log = logging.getLogger(__name__)

_STORE = ".stagereg"
_NUMBER = re.compile(r"\.?step-(\d+)")
_PLACEHOLDER = re.compile(r"/proc/\d+/comm")
_ALL = 10**9  # checkpoints are kept: the trainer removes them


class LinkedCheckpoints:
    """The checkpoints of one directory, on one rank. Constructing it is collective.

    Args:
        parent: the directory, a real path; made if it is not there.
        is_first: whether this is rank 0.
        options: of the :class:`stagereg.Checkpointer`, which says what it raises.

    Attributes:
        checkpointer: that writes them.
    """

    def __init__(self, parent: str, is_first: bool, options: Mapping[str, Any]) -> None:
        self._parent, self._is_first = Path(parent), is_first
        self._store = self._parent / _STORE
        self.checkpointer = Checkpointer(
            str(self._store), keep=_ALL, resume="never", grace=None, save_last=False, **options
        )
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # for the save of that number, or a later one
        self._saved = self._committed = 0
        self._failure: CheckpointError | None = None  # to move links, which no call has raised yet
        if is_first:
            self.checkpointer.on_commit(self._complete)
            self._clear_placeholders()  # of runs that were killed

    def next_number(self) -> int:
        """Return the number of the next save, which none there has, whoever wrote it; on rank 0.

        Raises:
            CheckpointError: a checkpoint is complete, and could not be linked.
        """
        self._raise_failure()
        there = (_NUMBER.match(name) for name in os.listdir(self._store))
        return 1 + max([self._saved, *(int(found[1]) for found in there if found)])

    def save(self, state: Mapping[str, Any], name: str, number: int) -> None:
        """Stage ``state``, and have it found under ``name`` once it is complete; all ranks have the same number.

        Raises as :meth:`stagereg.Checkpointer.save`.
        """
        path = self._parent / name
        if self._is_first:
            if not os.path.lexists(path):
                path.symlink_to(f"/proc/{os.getpid()}/comm")
            with self._lock:
                self._waiting.append((number, partial(self._link, path, number)))
        self._saved = number
        self.checkpointer.save(number, dict(state))

    def after_saves(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` once what was saved last is complete; if that fails, once a later save is."""
        with self._lock:
            if self._committed < self._saved:
                self._waiting.append((self._saved, remove))
                return
        remove()

    def close(self) -> None:
        """Wait for all saves. Raises: ``CheckpointError`` if one has failed and no call has raised that yet."""
        try:
            self.checkpointer.close()
        finally:
            self._clear_placeholders()
        self._raise_failure()

    def _clear_placeholders(self) -> None:
        for path in self._parent.iterdir() if self._is_first else ():
            if _is_placeholder(path):
                path.unlink()

    def _complete(self, number: int) -> None:
        with self._lock:
            due = [action for least, action in self._waiting if least <= number]
            self._waiting = [each for each in self._waiting if each[0] > number]
            self._committed = number
        try:
            for action in due:
                action()
        except OSError as error:
            self._failure = CheckpointError(
                f"A checkpoint is complete in {self._store}/step-{number:08d}, but paths in {self._parent} could not "
                f"be changed to point there: {error}"
            )

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _link(self, path: Path, number: int) -> None:
        """Have ``path`` point to the save of that number; what was there before goes."""
        target = self._store / f"step-{number:08d}"
        if not target.is_dir():
            return  # it has failed, and a later one has not
        before = _target(path)
        if path.is_dir() and not path.is_symlink():
            before = self._store / _hidden(number)
            path.rename(before)
        link = self._store / f".link-{number}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"{_STORE}/{target.name}")  # as seen from where it goes now
        link.replace(path)
        _flush(self._parent)
        if before is not None:
            _delete_tree(before)


def split(path: Any) -> tuple[str, str]:
    """Return the directory of ``path`` and the name in it. Raises: ``ConfigError`` for a URL."""
    if "://" in str(path):
        raise ConfigError(f"{path} is a URL, where nothing can be linked. Save to a file system that all ranks see.")
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.realpath(parent), name


def choose(path: str, verify: bool) -> str | None:
    """Return the directory of the checkpoint that is to be read for ``path``; ``None`` if that is not stagereg's.

    Where the name begins with ``last``, and what it points to is no good checkpoint, the newest good one beside it.

    Args:
        path: a link, or the directory of a checkpoint.
        verify: whether to compare the content of all files with their checksums.

    Raises:
        CheckpointError: it is damaged, incomplete or not there.
    """
    there = os.path.realpath(path)
    if os.path.exists(there) and not _is_placeholder(Path(path)) and not os.path.exists(f"{there}/manifest.json"):
        return None
    parent, name = split(path)
    store = Path(parent) / _STORE
    others = sorted(store.glob("step-*"), reverse=True) if name.startswith("last") else []
    first: CheckpointError | None = None
    for each in dict.fromkeys([there, *map(str, others)]):
        try:
            open_checkpoint(each, verify=verify).close()
        except CheckpointError as error:
            first = first or error
        else:
            if first is not None:
                _log.warning("stagereg: %s is passed over: %s. Loaded in its place: %s", path, first, each)
            return each
    raise CheckpointError(f"{path} cannot be loaded: {first}")


def _is_placeholder(path: Path) -> bool:
    return path.is_symlink() and _PLACEHOLDER.fullmatch(os.readlink(path)) is not None


def _target(path: Path) -> Path | None:
    """Return the checkpoint that the link ``path`` points to; ``None`` if it is no such link."""
    target = path.parent / os.readlink(path) if path.is_symlink() else path
    return target if target.parent.name == _STORE and _NUMBER.match(target.name) else None


def delete(path: Path) -> None:
    """Delete a link with the checkpoint it points to, or what else is there."""
    target = _target(path)
    if path.is_dir() and not path.is_symlink():
        target = path
    else:
        path.unlink(missing_ok=True)
    if target is not None:
        _delete_tree(target)


def _delete_tree(path: Path) -> None:
    """Delete a checkpoint: first its name, so that no half of one is left under it."""
    if path.exists():
        hidden = path.parent / _hidden(0)
        shutil.rmtree(path.rename(hidden) if _NUMBER.match(path.name) else path)


def _hidden(number: int) -> str:
    return f".step-{number:08d}.{secrets.token_hex(8)}.tmp"  # what the next run deletes, should this one be killed


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
