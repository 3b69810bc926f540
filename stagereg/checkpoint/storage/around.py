"""A storage writer around another one, which has it do everything: what writers that change one thing derive from."""

from __future__ import annotations

import inspect
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

__all__ = ["AroundWriter"]


class AroundWriter(StorageWriter):
    """Passes every call on to ``inner``, a storage of this project or any writer of torch's."""

    def __init__(self, inner: StorageWriter) -> None:
        self.inner = inner
        parameters = inspect.signature(inner.set_up_storage_writer).parameters.values()
        self._takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As the writer inside."""
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the writer inside."""
        self.inner.set_up_storage_writer(is_coordinator, *args, **(kwargs if self._takes_more else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the writer inside."""
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the writer inside."""
        return self.inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the writer inside."""
        return self.inner.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the writer inside."""
        self.inner.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether any writer could take it is for the writer inside to say, which is not known yet."""
        return True

    def storage_meta(self) -> Any:
        """As the writer inside."""
        return self.inner.storage_meta()
