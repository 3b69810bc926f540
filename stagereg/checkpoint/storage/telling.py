"""A storage writer around another one, whose errors torch can take to the other ranks.

``torch.distributed.checkpoint`` sends the error of one rank to all of them. One that cannot be pickled, or not be
unpickled over there, would fail on the way, and so would one of ``reset``, which torch calls before it looks for any:
then this rank goes on by itself, and the others wait for it without end.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stagereg.checkpoint.agreement import portable
from stagereg.checkpoint.storage.around import AroundWriter

__all__ = ["TellingWriter"]


class TellingWriter(AroundWriter):
    """Passes every call on to ``inner``; what cannot be sent is raised as a ``RuntimeError`` of its text."""

    def __init__(self, inner: StorageWriter) -> None:
        super().__init__(inner)
        self._failed: BaseException | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As the writer inside; what that raises comes out of :meth:`set_up_storage_writer`."""
        self._failed = None
        try:
            super().reset(checkpoint_id)
        except BaseException as error:
            self._failed = error

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the writer inside."""
        with _portably():
            if self._failed is not None:
                raise self._failed
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the writer inside."""
        with _portably():
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the writer inside."""
        with _portably():
            return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the writer inside; returns when it has written."""
        with _portably():
            written = super().write_data(plan, planner)
            written.wait()
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the writer inside."""
        with _portably():
            super().finish(metadata, results)

    def storage_meta(self) -> Any:
        """As the writer inside."""
        with _portably():
            return super().storage_meta()


@contextmanager
def _portably() -> Generator[None, None, None]:
    try:
        yield
    except BaseException as error:
        told = portable(error)
        if told is error:
            raise
        raise told from error
