"""Reads entries through the reader of the storage that wrote them, as ``torch.distributed.checkpoint.load`` does.

This is needed only for storages of other packages, if the index of their checkpoints has no offsets in files.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, reason


def read_through(storage: Storage, path: str, wanted: dict[str, Any], load_object: Callable[[str, bytes], Any]) -> None:
    """Read the entries ``wanted`` of the checkpoint ``path``: tensors into their memory, objects by ``load_object``.

    Raises: ``CheckpointError`` if the reader raised an error, or skipped an entry.
    """
    planner = _Planner(load_object)
    try:
        reader = storage.reader(path)
        metadata = reader.read_metadata()
        planner.set_up_planner(wanted, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
        planner.expect_all_read()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(reason(error)) from error


class _Planner(DefaultLoadPlanner):
    """Passes objects to ``load_object``, which runs no code from them; torch's own planner would unpickle them."""

    def __init__(self, load_object: Callable[[str, bytes], Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._load_object = load_object
        self._left: set[tuple[MetadataIndex, MetadataIndex]] = set()  # unread items: destination and source

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self._left = {(item.dest_index, item.storage_index) for item in plan.items}
        return plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._left.discard((read_item.dest_index, read_item.storage_index))
        return super().resolve_tensor(read_item)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._left.discard((read_item.dest_index, read_item.storage_index))
        name = read_item.dest_index.fqn
        self.state_dict[name] = self._load_object(name, value.getvalue())

    def expect_all_read(self) -> None:
        for _, stored in self._left:
            at = f" at offset {[*stored.offset]}" if stored.offset and any(stored.offset) else ""
            raise CheckpointError(f"the reader of its storage skipped {stored.fqn!r:.100}{at}")
