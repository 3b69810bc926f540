"""A fast storage writer and a verifying reader for ``torch.distributed.checkpoint``, without a ``Checkpointer``.

``DcpWriter`` writes the files of ``storage=dcp`` to a temporary directory. When all ranks have flushed their files, the
coordinator rank renames this directory to the path of the checkpoint. The file ``checksums.json`` in the directory has
the size and the CRC-32 of each other file, in the format of a manifest (:mod:`.manifest`). ``DcpReader`` verifies the
checksums before any rank loads a tensor. The calling program chooses which checkpoints to load and to delete.
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

import stagereg.checkpoint.format.damage as damage
from stagereg.base.small_files import discard, read_small, sync, temporary, temporary_of
from stagereg.checkpoint.format.damage import Found, VerificationResult, differences, marks_of_shares, share_of_rank
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

_PATIENCE_S = 1.0  # seconds that a save waits for another thread that saves to the same path
_POLL_INTERVAL_S = 0.01
_CHECKSUMS_BYTES = 1 << 28  # largest checksums.json that is read
_FILLED = frozenset({torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})

_log = logging.getLogger(__name__)
_lock, _staging = threading.Lock(), threading.Lock()
_saving: weakref.WeakValueDictionary[Path, threading.Thread] = weakref.WeakValueDictionary()
"""Maps the path of each running save to its thread, on the coordinator. Saves on the main thread are not in this table.

If a save fails before :meth:`DcpWriter.finish`, its path stays in the table until the thread ends or saves again.
"""


class DcpWriter(StorageWriter, AsyncStager):
    """Writes a checkpoint that is complete or absent: ``dcp.save(state, storage_writer=stagereg.DcpWriter(path))``.

    Works with ``save`` and ``async_save`` of ``torch.distributed.checkpoint``. Plain ``dcp.load`` can read the
    checkpoint; :class:`DcpReader` also verifies it. All ranks must see the same file system.

    While the ranks write, the files are in ``.NAME.TOKEN.tmp`` next to ``path``, with a random token. If a save is
    killed, the next save to the same path deletes that directory. An existing checkpoint at ``path`` is replaced
    atomically. If the file system cannot exchange two directories (NFS), two renames are needed. A process that is
    killed between them leaves the old checkpoint in ``.NAME.TOKEN.old``. Concurrent saves need different paths.

    Like torch's ``FileSystemWriter``, the writer also stages for ``async_save``, unless an ``async_stager`` is passed.
    It uses the stager ``overlapped``, and :meth:`stage` returns complete copies. All writers of a process share the
    memory of one copy, or of two copies while saves overlap; :meth:`close` frees the memory.

    Args:
        path: the directory of one checkpoint. The argument ``checkpoint_id`` of ``save`` overrides this path.
        direct: ``"auto"`` bypasses the page cache if the file system supports it; ``"never"`` uses the page cache.

    Attributes:
        path: the absolute path of the last directory that was set; ``None`` if no directory was set.

    Raises:
        ConfigError: ``path`` is a URL, but object stores cannot rename directories.
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
        """Return whether ``checkpoint_id`` is a path, not a URL."""
        return local_part(checkpoint_id) is not None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: torch need not wait for the copy, because :meth:`stage` returns only when the copy is complete."""
        return False

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory. Errors of the stager ``overlapped`` propagate."""
        with _staging:
            return _default_stager().stage(state_dict).result()

    def close(self) -> None:
        """Free the memory that all writers of this process reuse in :meth:`stage`. Idempotent."""
        with _staging:
            if _default_stager.cache_info().currsize:
                stager = _default_stager()
                _default_stager.cache_clear()  # before close(): the next copy needs a new stager even if close() raises
                stager.close()

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a new checkpoint at ``checkpoint_id``, by default at ``path``. Raises ``ConfigError`` for a URL."""
        path = _local(checkpoint_id, type(self).__name__).resolve() if checkpoint_id else self.path
        self.path = self._save.path = path
        self._save.storage = DcpStorage(direct=self._direct)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save on this rank. Raises ``CheckpointError`` if ``save`` was called with use_collectives=False."""
        if not hasattr(self._save, "storage"):  # torch calls reset() only if the caller passes a checkpoint_id
            self.reset()
        self._save.storage.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the path and the tensors, and return the plan unchanged.

        Raises:
            CheckpointError: no path is set, the directory contains files that are not part of a checkpoint, or the
                state contains a tensor that torch could not load again.
        """
        if self._save.path is None:
            raise CheckpointError("DcpWriter has no directory. Pass DcpWriter(path), or checkpoint_id=path to save().")
        if self._save.path.exists() and (others := _others(self._save.path)):
            what = ", ".join(sorted(others)[:3])
            raise CheckpointError(
                f"Saving to {self._save.path} would delete files that are not part of a checkpoint: {what}. "
                "Use a separate directory for each checkpoint."
            )
        self._save.beside = ""
        for item in plan.items:
            if item.tensor_data is not None:
                properties = item.tensor_data.properties
                _expect_filled(item.index.fqn, properties.dtype, properties.layout, "saved")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the temporary directory. Called on the coordinator before any rank writes.

        Raises:
            CheckpointError: another thread is still writing an earlier save to the same path. Also ``OSError``.
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
        """Write and flush this rank's files. The results include each file's size and CRC-32. Raises ``OSError``."""
        number, beside = plan.storage_data
        self._save.storage.reset(self._save.beside or self._find_beside(beside))
        results = self._save.storage.write_data(replace(plan, storage_data=number), planner).wait()
        done: Future[list[WriteResult]] = Future()
        marks = self._save.storage.marks.items()
        done.set_result([*results, *(_FileResult(MetadataIndex(name), mark.bytes, mark) for name, mark in marks)])
        failpoint("written")
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and the checksums, then rename the directory to ``path``. Called on the coordinator.

        Raises:
            CheckpointError: a file that a rank wrote is missing, or its size has changed. Also ``OSError``.
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
        own = [[each for each in part if not isinstance(each, _FileResult)] for part in results]
        self._save.storage.finish(metadata, own)
        files = {**{each.index.fqn: each.storage_data for each in marks}, **self._save.storage.marks}
        manifest = Manifest(step_within(path.name) or 0, len(results), 0, files, time=now())
        manifest.expect_readable(os.fspath(path))
        sizes: dict[str, Found] = {each.name: each.stat().st_size for each in os.scandir(beside)}
        if lost := differences(manifest, sizes):
            text = f"The save to {beside} is incomplete: {VerificationResult(path.name, manifest, lost)}. Save again."
            raise CheckpointError(text)
        open_store(path.parent).put(os.fspath(beside), CHECKSUMS, manifest.dumps().encode())
        sync(beside)
        failpoint("described")
        old = exchange(beside, path)
        failpoint("renamed")
        sync(path.parent)
        failpoint("committed")
        if old.is_dir() and (others := _others(old)):
            other = printable(others[0], lines=False)
            _log.warning("Did not delete %s: %s was written to %s during the save.", old, other, path)
        else:
            discard(os.fspath(old))

    def _find_beside(self, planned: str) -> str:
        """Return this save's temporary directory: ``planned``, unless torch reused the plan of an earlier save."""
        path, plan = cast("Path", self._save.path), Path(planned)
        if plan.parent == path.parent and temporary_of(plan.name) == path.name and os.path.isdir(planned):
            return planned
        found = [os.fspath(each) for each in _left_beside(path) if temporary_of(each.name)]
        if len(found) != 1:
            raise CheckpointError(
                f"Expected exactly one directory .{path.name}.TOKEN.tmp in {path.parent}, found {len(found)}. "
                "Delete all such directories, which killed saves left, and save again."
            )
        return found[0]


class _Save(threading.local):
    """The state of the save on the current thread. torch makes all calls for one save on the same thread."""

    path: Path | None = None
    beside = ""  # path of the temporary directory; set only on the coordinator
    storage: DcpStorage


class DcpReader(FileSystemReader):
    """Verifies a checkpoint, then loads it: ``dcp.load(state, storage_reader=stagereg.DcpReader(path))``.

    Before any rank loads a tensor, the ranks compare the size and the CRC-32 of every file with the checksums of
    :class:`DcpWriter`; each rank reads an equal portion of the bytes. A checkpoint of torch's own writer has no
    checksums: it is loaded without verification, and a warning is logged.

    Args:
        path: the directory of the checkpoint; ``checkpoint_id`` of ``load`` overrides it.

    Raises:
        ConfigError: ``path`` is a URL or None.
        CheckpointError: a file is corrupt, or the state contains a quantized or sparse COO tensor, which torch would
            not fill. ``dcp.load`` wraps this error in a ``CheckpointException``.
    """

    def __init__(self, path: StrPath) -> None:
        if path is None:
            raise ConfigError(f"{type(self).__name__} requires the directory of a checkpoint, got None.")
        super().__init__(_local(path, type(self).__name__))
        self._manifest: Manifest | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Verify and return torch's metadata. Raises ``CheckpointError`` if the file is corrupt, or ``OSError``."""
        checksums = os.path.realpath(Path(self.path) / CHECKSUMS)
        try:
            self._manifest = Manifest.loads(read_small(checksums, _CHECKSUMS_BYTES))
        except FileNotFoundError:
            self._manifest = None
        except (OSError, ValueError) as error:
            raise CorruptCheckpointError(f"{checksums} is corrupt: {error}") from error
        if self._manifest is not None:
            only = {METADATA: self._manifest.files[METADATA]} if METADATA in self._manifest.files else {}
            self._expect(replace(self._manifest, files=only), self._contents({METADATA: damage.WHOLE}))
        return super().read_metadata(*args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read this rank's portion of the files, and return the plan with the checksums of the bytes read."""
        if self._manifest is None:
            return plan
        share = share_of_rank(self._manifest.files, self.rank or 0, _world_size())
        return replace(plan, storage_data=self._contents(share))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``CheckpointError`` if a checksum that a rank computed is wrong. Called on the coordinator."""
        if self._manifest is None:
            _log.warning("%s has no %s, so it is loaded without verification.", self.path, CHECKSUMS)
            return plans
        found = [plan.storage_data for plan in plans]
        if len(found) != _world_size() or None in found:  # only some ranks load, so some bytes were not read
            found = [self._contents(dict.fromkeys(self._manifest.files, damage.WHOLE))]
        self._expect(self._manifest, marks_of_shares(found))
        return [replace(plan, storage_data=None) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors as torch does. Raises ``CheckpointError`` for a quantized or sparse COO tensor."""
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
                f"{self.path} is corrupt, so nothing was loaded: "
                f"{VerificationResult(os.fspath(self.path), manifest, damages)}"
            )


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """The size and checksum of a file, sent to the coordinator in ``storage_data``. ``index.fqn`` is the file name."""


def _local(path: StrPath, what: str) -> Path:
    if (found := local_part(path)) is None:
        raise ConfigError(f"{what} requires a local directory, got {path}. Use stagereg.Checkpointer to save to a URL.")
    return found


def _others(path: Path) -> list[str]:
    """Return the names in the directory ``path`` that are not part of a checkpoint; a message if ``path`` is a file."""
    if not path.is_dir():
        return ["this path is a file"]
    with os.scandir(path) as entries:
        return [each.name for each in entries if each.is_dir(follow_symlinks=False) or not _is_part(each.name)]


def _is_part(name: str) -> bool:
    return name in (METADATA, CHECKSUMS) or name.endswith(DEFAULT_SUFFIX)


def _left_beside(path: Path) -> list[Path]:
    """Return temporary directories of killed saves to ``path``; if ``path`` exists, also checkpoints it replaced."""
    of = [temporary_of, aside_of] if path.exists() else [temporary_of]
    named = [each for each in path.parent.iterdir() if path.name in [find(each.name) for find in of]]
    return [each for each in named if each.is_dir() and not each.is_symlink()]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _expect_filled(name: str, dtype: torch.dtype, layout: torch.layout, verb: str) -> None:
    """Raise ``CheckpointError`` for a quantized or sparse COO tensor, because torch would load no values into it."""
    expect_dense(name, dtype, torch.strided if layout in _FILLED else layout, verb)


@functools.cache
def _default_stager() -> Any:
    """Return the stager that all writers share, because allocating memory per writer would cost more than a copy."""
    return build("stager", "overlapped")


def _expect_sole(path: Path) -> None:
    """Record that this thread saves to ``path``. Raises ``CheckpointError`` if another live thread saves there."""
    until = time.monotonic() + _PATIENCE_S
    while not _claim(path):
        if time.monotonic() > until:
            raise CheckpointError(
                f"An earlier save to {path} is still being written. Wait for its future before you save again. If that "
                "save has failed, save again from the same thread, or end that thread."
            )
        time.sleep(_POLL_INTERVAL_S)


def _claim(path: Path) -> bool:
    """Record that this thread saves to ``path``. Return False if another live thread already saves there."""
    this = threading.current_thread()
    with _lock:
        other = _saving.get(path)
        if other is not None and other is not this and other.is_alive():
            return False
        _forget(this)
        if this is not threading.main_thread():  # the main thread waits until its save has ended
            _saving[path] = this
        return True


def _forget(thread: threading.Thread) -> None:
    for path in [each for each, saves in _saving.items() if saves is thread]:
        del _saving[path]
