"""The fast writer and the checks for plain ``torch.distributed.checkpoint``, without a :class:`stagereg.Checkpointer`.

``DcpWriter`` writes as the storage ``dcp`` does, into a directory beside, which the coordinator renames when all ranks
have written and flushed their files. ``checksums.json`` in it has size and CRC-32 of each other file, as a manifest
(:mod:`.manifest`) has them. ``DcpReader`` compares them before anything is loaded. Retention, the choice of what is
loaded, and a state that does not fit are left to torch and its callers.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stagereg.base.small_files import discard, read_small, sync, temporary, temporary_of
from stagereg.checkpoint.format.damage import (
    WHOLE,
    Found,
    VerificationResult,
    differences,
    marks_of_shares,
    share_of_rank,
)
from stagereg.checkpoint.format.manifest import CHECKSUMS, METADATA, Manifest, now, step_within
from stagereg.checkpoint.format.pickled import expect_dense
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.files import StrPath
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.open_store import local_part, open_parent_store, open_store
from stagereg.errors import CheckpointError, ConfigError, CorruptCheckpointError, printable
from stagereg.extensions.interop.exchange import aside_of, exchange
from stagereg.registry import build
from stagereg.stagers.async_stager import AsyncStager, StateDict

_PATIENCE_S = 1.0  # for the end of the thread of a save that has just failed
_POLL_INTERVAL_S = 0.01
_CHECKSUMS_BYTES = 1 << 28  # a longer file is not read
_FILLED = frozenset({torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})

_log = logging.getLogger(__name__)
_lock, _staging = threading.Lock(), threading.Lock()
_saving: weakref.WeakValueDictionary[Path, threading.Thread] = weakref.WeakValueDictionary()
"""By path, the thread that saves there, if it is not the main thread, in a process that is the coordinator.

A save that fails before :meth:`DcpWriter.finish` leaves its thread here until that thread ends or saves again.
"""


class DcpWriter(StorageWriter, AsyncStager):
    """Writes a checkpoint that is complete or absent: ``dcp.save(state, storage_writer=stagereg.DcpWriter(path))``.

    For ``save`` and ``async_save`` of ``torch.distributed.checkpoint``. What it wrote plain ``dcp.load`` reads, and
    :class:`DcpReader`, which checks it. All ranks see the same file system.

    Until ``finish`` the files are in ``.NAME.TOKEN.tmp`` beside ``path``, where a killed save leaves them and the next
    save to the same path deletes them. A checkpoint that is at ``path`` already is replaced in one step, and in two if
    the file system cannot exchange directories (NFS): killed between them, it is at ``.NAME.TOKEN.old``. Saves that are
    under way at the same time may share a writer, and need a path each.

    As torch's ``FileSystemWriter``, it stages for ``async_save``, unless that is given an ``async_stager``: with
    ``stager=overlapped``, whose copies are complete when :meth:`stage` returns. All writers of the process share its
    memory, that of one copy, and of two while saves overlap; :meth:`close` frees it.

    Args:
        path: the directory of this one checkpoint; ``checkpoint_id`` of ``save`` names another.
        direct: ``"auto"`` writes past the page cache where the file system takes that, ``"never"`` nowhere.

    Attributes:
        path: the directory named last, resolved; ``None`` if none was named yet.

    Raises:
        ConfigError: ``path`` is a URL; no directory of an object store can be renamed.
    """

    def __init__(self, path: StrPath | None = None, direct: str = "auto") -> None:
        self.path: Path | None = None
        self._direct = direct
        self._save = _Save()
        self.reset(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._direct)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether it is a path of this machine's file systems."""
        return local_part(checkpoint_id) is not None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: a copy is complete when it is handed out."""
        return False

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory. Raises: as the default stager does."""
        with _staging:
            copied: StateDict = _default_stager().stage(state_dict).result()
            return copied

    def close(self) -> None:
        """Free the memory that is kept for the next :meth:`stage`, of any writer. Nothing else is to be closed."""
        with _staging:
            if _default_stager.cache_info().currsize:
                stager = _default_stager()
                _default_stager.cache_clear()  # first: also where closing raises, the next copy has a stager
                stager.close()

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another checkpoint, at ``checkpoint_id`` if that is given. Raises: ``ConfigError``."""
        path = _local(checkpoint_id, type(self).__name__).resolve() if checkpoint_id else self.path
        self.path = self._save.path = path
        self._save.storage = DcpStorage(direct=self._direct)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take part. Raises: ``CheckpointError`` with torch's ``use_collectives=False``."""
        if not hasattr(self._save, "storage"):  # torch calls ``reset`` only with a ``checkpoint_id``
            self.reset()
        self._save.storage.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan.

        Raises:
            CheckpointError: no path was given, what is there is no checkpoint, or a tensor could not be loaded.
        """
        if self._save.path is None:
            raise CheckpointError("DcpWriter was given no directory: DcpWriter(path), or checkpoint_id=path.")
        if self._save.path.exists() and (others := _others(self._save.path)):
            what = ", ".join(sorted(others)[:3])
            raise CheckpointError(
                f"{self._save.path} has what is no part of a checkpoint ({what}), and would be replaced "
                "as a whole: give each checkpoint a directory of its own."
            )
        self._save.beside = ""
        for item in plan.items:
            if item.tensor_data is not None:
                properties = item.tensor_data.properties
                _expect_filled(item.index.fqn, properties.dtype, properties.layout, "saved")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory beside, empty. Called on the coordinator, before any rank writes.

        Raises:
            CheckpointError: an earlier save to the same path is still being written. ``OSError``.
        """
        assert self._save.path is not None
        _expect_sole(self._save.path)
        self._save.path.parent.mkdir(parents=True, exist_ok=True)
        for left in _left_beside(self._save.path):
            if not _others(left):
                discard(os.fspath(left))
        self._save.beside = temporary(self._save.path)
        os.mkdir(self._save.beside)
        failpoint("made")
        numbered = self._save.storage.prepare_global_plan(plans)
        return [replace(plan, storage_data=(plan.storage_data, self._save.beside)) for plan in numbered]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and flush this rank's files, whose marks go to the coordinator. Raises: ``OSError``."""
        number, beside = plan.storage_data
        self._save.storage.reset(self._save.beside or self._find_beside(beside))
        plan = replace(plan, storage_data=number)
        results = self._save.storage.write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        marks = self._save.storage.marks.items()
        done.set_result([*results, *(_FileResult(MetadataIndex(name), mark.bytes, mark) for name, mark in marks)])
        failpoint("written")
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and the checksums, and commit. Called on the coordinator.

        Raises:
            CheckpointError: a file is not there as it was written. ``OSError``.
        """
        try:
            self._commit(metadata, results)
        finally:
            with _lock:
                _forget(threading.current_thread())

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._save.path is not None
        beside, path = Path(self._save.storage.path), self._save.path
        marks = [each for part in results for each in part if isinstance(each, _FileResult)]
        self._save.storage.finish(
            metadata, [[each for each in part if not isinstance(each, _FileResult)] for part in results]
        )
        files = {**{each.index.fqn: each.storage_data for each in marks}, **self._save.storage.marks}
        manifest = Manifest(step_within(path.name) or 0, len(results), 0, files, time=now())
        manifest.expect_readable(os.fspath(path))
        sizes: dict[str, Found] = {each.name: each.stat().st_size for each in os.scandir(beside)}
        if lost := differences(manifest, sizes):
            raise CheckpointError(
                f"{beside} was not written as it should be: {VerificationResult(path.name, manifest, lost)}"
            )
        open_store(path.parent).put(os.fspath(beside), CHECKSUMS, manifest.dumps().encode())
        sync(beside)
        failpoint("described")
        old = exchange(beside, path)
        failpoint("renamed")
        sync(path.parent)
        failpoint("committed")
        if old.is_dir() and (others := _others(old)):
            other = printable(others[0], lines=False)
            _log.warning("%s has %s, which came to %s during the save: it was not deleted.", old, other, path)
        else:
            discard(os.fspath(old))

    def _find_beside(self, told: str) -> str:
        """Return the directory of this save: ``told``, but torch's plan caching tells that of an earlier save."""
        path = cast("Path", self._save.path)
        if Path(told).parent == path.parent and temporary_of(Path(told).name) == path.name and os.path.isdir(told):
            return told
        found = [os.fspath(each) for each in _left_beside(path) if temporary_of(each.name)]
        if len(found) != 1:
            raise CheckpointError(
                f"{path.parent} has {len(found)} directories .{path.name}.TOKEN.tmp, and must have the one of this "
                "save: delete what killed saves have left, and save again."
            )
        return found[0]


class _Save(threading.local):
    """The save of a thread: torch makes all calls for one on one thread."""

    path: Path | None = None
    beside = ""  # the directory that it is written in, on the coordinator
    storage: DcpStorage


class DcpReader(FileSystemReader):
    """Loads what is undamaged, and nothing else: ``dcp.load(state, storage_reader=stagereg.DcpReader(path))``.

    Before any rank loads, size and CRC-32 of every file are compared with those that :class:`DcpWriter` has written
    down; each rank reads an equal share of the bytes. What torch's own writer wrote has no checksums: it is loaded as
    it is, and a warning in the log says so.

    Args:
        path: the directory of the checkpoint; ``checkpoint_id`` of ``load`` names another.

    Raises:
        ConfigError: ``path`` is a URL, or None.
        CheckpointError: a file is damaged, or a tensor of the state is sparse, which torch would leave as it is, or
            quantized; from ``dcp.load``, which wraps it into a ``CheckpointException``.
    """

    def __init__(self, path: StrPath) -> None:
        if path is None:
            raise ConfigError(f"{type(self).__name__} takes the directory of a checkpoint, and not None.")
        super().__init__(_local(path, type(self).__name__))
        self._manifest: Manifest | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata, which is checked. Raises: ``CheckpointError``, ``OSError``."""
        checksums = os.path.realpath(Path(self.path) / CHECKSUMS)
        try:
            self._manifest = Manifest.loads(read_small(checksums, _CHECKSUMS_BYTES))
        except FileNotFoundError:
            self._manifest = None
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(f"{checksums} is corrupt: {error}") from error
        if self._manifest is not None:
            only = {METADATA: self._manifest.files[METADATA]} if METADATA in self._manifest.files else {}
            self._expect(replace(self._manifest, files=only), self._contents({METADATA: WHOLE}))
        return super().read_metadata(*args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read this rank's share of the bytes; what was found goes to the coordinator with the plan."""
        if self._manifest is None:
            return plan
        return replace(
            plan, storage_data=self._contents(share_of_rank(self._manifest.files, self.rank or 0, _world_size()))
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what the ranks have found. Called on the coordinator. Raises: ``CheckpointError``."""
        if self._manifest is None:
            _log.warning("%s has no %s: another writer made it, and it is loaded unchecked.", self.path, CHECKSUMS)
            return plans
        found = [plan.storage_data for plan in plans]
        if len(found) != _world_size() or None in found:  # a part of the ranks loads, and their shares are not all
            found = [self._contents(dict.fromkeys(self._manifest.files, WHOLE))]
        self._expect(self._manifest, marks_of_shares(found))
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read as torch does. Raises: ``CheckpointError`` for a tensor that torch would leave as it is."""
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                x = planner.resolve_tensor(item)
                _expect_filled(item.dest_index.fqn, x.dtype, x.layout, "loaded")
        return super().read_data(plan, planner)

    def _contents(self, parts: dict[str, range]) -> dict[str, Found]:
        return open_parent_store(self.path).contents(os.fspath(self.path), parts)

    def _expect(self, manifest: Manifest, found: dict[str, Found]) -> None:
        if damages := differences(manifest, found):
            raise CorruptCheckpointError(
                f"{self.path} is damaged, and nothing of it was loaded: "
                f"{VerificationResult(os.fspath(self.path), manifest, damages)}"
            )


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """The mark of a file, on the way to the coordinator: ``storage_data``, with the name as ``index.fqn``."""


def _local(path: StrPath, what: str) -> Path:
    if (found := local_part(path)) is None:
        raise ConfigError(f"{what} takes a directory of this machine, not {path}; stagereg.Checkpointer saves to URLs.")
    return found


def _others(path: Path) -> list[str]:
    """Return the names in a directory that are no part of a checkpoint; that there is a file in its place."""
    if not path.is_dir():
        return ["it is a file"]
    with os.scandir(path) as entries:
        return [each.name for each in entries if each.is_dir(follow_symlinks=False) or not _is_part(each.name)]


def _is_part(name: str) -> bool:
    return name in (METADATA, CHECKSUMS) or name.endswith(DEFAULT_SUFFIX)


def _left_beside(path: Path) -> list[Path]:
    """Return the directories of saves to ``path`` that did not end, and what they replaced if that is not needed."""
    of = [temporary_of, aside_of] if path.exists() else [temporary_of]
    named = [each for each in path.parent.iterdir() if path.name in [find(each.name) for find in of]]
    return [each for each in named if each.is_dir() and not each.is_symlink()]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _expect_filled(name: str, dtype: torch.dtype, layout: torch.layout, verb: str) -> None:
    """Refuse a quantized tensor, and one that torch's reader leaves as it is: a detached COO one has its own."""
    expect_dense(name, dtype, torch.strided if layout in _FILLED else layout, verb)


@functools.cache
def _default_stager() -> Any:
    """The stager of all writers: a program may make one a checkpoint, and fresh memory costs more than a copy."""
    return build("stager", "overlapped")


def _expect_sole(path: Path) -> None:
    """Note that this thread saves to ``path``. Raises: ``CheckpointError`` if another live thread does."""
    until = time.monotonic() + _PATIENCE_S
    while not _take(path):
        if time.monotonic() > until:
            raise CheckpointError(
                f"An earlier save to {path} is still being written: wait for its future first. If that save has "
                "failed, save again from its thread, or end that thread."
            )
        time.sleep(_POLL_INTERVAL_S)


def _take(path: Path) -> bool:
    """Note that this thread saves to ``path``, and nowhere else any more; return False if another live thread does."""
    this = threading.current_thread()
    with _lock:
        other = _saving.get(path)
        if other is not None and other is not this and other.is_alive():
            return False
        _forget(this)
        if this is not threading.main_thread():  # which comes to a save when its last one has ended, or has failed
            _saving[path] = this
        return True


def _forget(thread: threading.Thread) -> None:
    for path in [each for each, saves in _saving.items() if saves is thread]:
        del _saving[path]
