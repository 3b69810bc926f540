"""A storage writer that forwards every call to another one: the base of a storage that does something besides."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

__all__ = ["ForwardingWriter"]


class ForwardingWriter(StorageWriter):
    """Forwards every call to ``inner``, a storage of this project or any writer of torch's."""

    def __init__(self, inner: StorageWriter) -> None:
        self.inner = inner

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forward."""
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Forward, with more than ``is_coordinator`` only where the inner writer takes it, as torch does."""
        takes_more = "kwargs" in inspect.signature(self.inner.set_up_storage_writer).parameters
        self.inner.set_up_storage_writer(is_coordinator, **(kwargs if takes_more else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Forward."""
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Forward."""
        return self.inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Forward."""
        return self.inner.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Forward."""
        self.inner.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the inner writer decides, and this is asked before it is known."""
        return True

    def storage_meta(self) -> Any:
        """Forward."""
        return self.inner.storage_meta()
