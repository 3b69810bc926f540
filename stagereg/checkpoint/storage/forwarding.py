"""A storage writer that forwards every call to another one, and whose errors torch can send to the other ranks.

``torch.distributed.checkpoint`` sends the error of one rank to all of them. An error that cannot be pickled, or not be
unpickled there, would fail on the way. So would an error of ``reset``, which torch calls before it collects errors:
this rank would go on by itself, and the others would wait for it without end. So errors are made picklable, and an
error of ``reset`` is raised by the next call.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stagereg.checkpoint.rank_group import portable

__all__ = ["ForwardingWriter"]


class ForwardingWriter(StorageWriter):
    """Forwards every call to ``inner``, a storage of this project or any writer of torch's.

    An error that cannot be pickled is raised as a ``RuntimeError`` of its text.
    """

    def __init__(self, inner: StorageWriter) -> None:
        self.inner = inner
        parameters = inspect.signature(inner.set_up_storage_writer).parameters.values()
        self._takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._reset_error: BaseException | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forward; an error is raised by :meth:`set_up_storage_writer`."""
        self._reset_error = None
        try:
            self.inner.reset(checkpoint_id)
        except BaseException as error:
            self._reset_error = error

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Forward, or raise the error of :meth:`reset`."""
        with _picklable_errors():
            if self._reset_error is not None:
                raise self._reset_error
            self.inner.set_up_storage_writer(is_coordinator, *args, **(kwargs if self._takes_more else {}))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Forward."""
        with _picklable_errors():
            return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Forward."""
        with _picklable_errors():
            return self.inner.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Forward; returns when the data is written."""
        with _picklable_errors():
            written = self.inner.write_data(plan, planner)
            written.wait()
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Forward."""
        with _picklable_errors():
            self.inner.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the inner writer decides, and this is asked before it is known."""
        return True

    def storage_meta(self) -> Any:
        """Forward."""
        with _picklable_errors():
            return self.inner.storage_meta()


@contextmanager
def _picklable_errors() -> Generator[None, None, None]:
    try:
        yield
    except BaseException as error:
        sent = portable(error)
        if sent is error:
            raise
        raise sent from error
