"""The checkpoint directory as a target of saves: commits each checkpoint atomically, and deletes old checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.base.command import command_key
from stagereg.checkpoint.format.index import INDEX, ArchiveResult, TensorResult
from stagereg.checkpoint.format.manifest import METADATA, FileDigest, Manifest
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.protocol import Storage, is_builtin, name_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.keep import GuardedRule, Keep
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.checkpoint.targets import ReadBack, SaveTarget, Schedule
from stagereg.errors import CheckpointError


class StoreTarget(SaveTarget):
    """The checkpoint directory as a save target of one checkpointer.

    ``token``: a random hexadecimal string of the run, in the temporary names of the run's saves. ``fields``: functions
    that return :class:`.Manifest` fields as a dict. Before a commit, rank 0 calls each with the step, on the thread of
    the save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        keep: Keep | GuardedRule,
        storage: Storage,
        ranks: RankGroup,
        token: str,
        schedule: Schedule | None = None,
        read_back: ReadBack | None = None,
        fields: Sequence[Callable[[int], Mapping[str, Any]]] = (),
    ) -> None:
        repeats = isinstance(storage, Storage) and storage.finished is not None
        super().__init__(store.root, ranks, storage, schedule or Schedule(1), repeats)
        self.store, self.keep, self.token = store, keep, token
        self._storage_name = name_of(storage)  # for manifests
        self.read_back = None if is_builtin(storage) else read_back
        self._tokens = random.Random(token)  # the same tokens on all ranks, without an exchange
        self._token, self._is_new = "", False
        self._fields = fields
        self._finished = b""  # on rank 0: torch's metadata, as the storage has written it

    def names(self, path: str) -> bool:
        return os.path.realpath(open_parent_store(path).root) == os.path.realpath(self.store.root)

    def begin(self, step: int) -> tuple[str, bool]:
        self._token, self._is_new = self._tokens.randbytes(len(self.token) // 2).hex(), False
        return self.store.temporary(step, self._token), False

    def expect_new(self, path: str) -> None:
        if self.ranks.rank == 0 and not self.store.backend.in_place:
            # Another rank of this save may have created the directory, which is then empty.
            there = [path] if os.path.islink(path) else self.store.backend.list(path)
            if there:
                raise CheckpointError(f"{path} already exists, and was not changed. Save again, under a new name.")
        self._is_new = True

    def finish(self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]) -> dict[str, FileDigest]:
        if metadata is None:
            return {METADATA: self.store.put(path, METADATA, self._finished)}
        self.storage.finish(metadata, results)
        self._finished = (self.storage.finished if isinstance(self.storage, Storage) else None) or b""
        return {}

    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        """Return the digests of this rank's files. Files without a digest from the storage are flushed and read.

        :meth:`commit` adds the digests of all other files, such as the metadata.
        """
        known: Mapping[str, FileDigest] = self.storage.marks if isinstance(self.storage, Storage) else {}
        if all(isinstance(each, (ArchiveResult, TensorResult)) for each in results):
            names = {each.storage_data.relative_path for each in results}
        else:  # the storage reports no file names: find files by the rank in their names, as torch writes them
            names = {name for name in self.store.backend.list(path) if name.startswith(f"__{self.ranks.rank}_")}
        return {**known, **{name: self.store.mark(path, name) for name in sorted(names - known.keys())}}

    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        store = self.store
        files[INDEX] = store.put(path, INDEX, index)
        there = store.backend.list(path, [METADATA])  # includes other files of the storage, such as .metadata
        files |= {name: store.mark(path, name) for name in there if name not in files}
        failpoint("marked")
        fields: dict[str, Any] = {"world_size": self.ranks.size, "command": command_key()}
        for each in self._fields:
            fields |= each(step)
        manifest = Manifest(step, serial=0, files=files, storage=self._storage_name, **fields)
        self.committed = store.publish(path, manifest, self.keep)

    def discard(self, step: int) -> None:
        path = self.store.temporary(step, self._token)
        if self.ranks.rank == 0 and (self._is_new or self.store.backend.in_place):
            self.store.backend.discard(path)
        elif self.ranks.rank == 0:
            with contextlib.suppress(OSError):  # a directory that another program has created may have files
                os.rmdir(path)

    def clear(self) -> None:
        self.store.retention.clear()
