"""A storage writer that has its ``write_data`` done by the process of :mod:`stagereg.checkpoint.process`.

Planning, and every collective of ``torch.distributed.checkpoint``, stays where it is; only ``write_data`` crosses over.
:class:`ProcessWriter` goes around any ``StorageWriter``: it sends the plan, the writer and a table of where the tensors
lie in shared memory, and gets back the results and the writer as it is after the write. No bytes of tensors are sent,
provided that the stager shares its memory (``shared``). A write that is asked for once more, since the process died on
it, is safe because files of an unfinished checkpoint are opened anew.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stagereg.checkpoint.process import WriterProcess
from stagereg.checkpoint.rank_group import portable
from stagereg.checkpoint.storage.forwarding import ForwardingWriter
from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.stagers.shared_memory import SharedBlock, is_plain
from stagereg.stagers.tensor_bundle import TensorBundle, pack, unpack

__all__ = ["ProcessWriter", "answer"]

_log = logging.getLogger(__name__)


# -- the messages


@dataclass
class _Question:
    """One ``write_data``: of each item of the plan, a number of a tensor in the bundle, or bytes."""

    writer: StorageWriter
    plan: SavePlan
    bundle: TensorBundle
    data: list[int | bytes]


@dataclass
class _Written:
    writer: StorageWriter
    results: list[WriteResult]


@dataclass
class _Failed:
    """The error, and those it was raised from and while handling; what cannot be pickled as text."""

    error: BaseException
    cause: BaseException | None
    context: BaseException | None

    def again(self) -> BaseException:
        self.error.__cause__, self.error.__context__ = self.cause, self.context
        return self.error


@dataclass
class _Unreadable:
    """The question could not be understood there."""

    why: str


# -- this side


class ProcessWriter(ForwardingWriter):
    """A storage writer whose ``write_data`` runs in another process; all else is done by the writer inside, here.

    The writer inside is pickled for each write, and takes over the state it had there afterwards. What cannot go
    across (a writer whose class the process cannot import, a tensor that is no plain one on the CPU) is written here,
    and the reason is logged. Tensors that do not lie in shared memory are copied there first.

    Args:
        inner: the writer; a storage of this project or any of torch's.
        process: where it writes; several writers may share it.
        until: when it is to have written, on ``time.monotonic``; then the process is killed.

    Example::

        process = WriterProcess()
        dcp.save(copy, storage_writer=ProcessWriter(FileSystemWriter(path), process))
    """

    def __init__(self, inner: StorageWriter, process: WriterProcess, until: float = math.inf) -> None:
        super().__init__(inner)
        self.process = process
        self._until = until

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Have the process write the items of ``plan``; returns when it has.

        Raises:
            CheckpointError: the process died twice, or has not written in time.
            Exception: what the writer raised there; a type that cannot be pickled is a ``RuntimeError`` of its text.
        """
        with _Sending() as sending:
            try:
                question = sending.question(self.inner, plan, planner)
            except _NotPortableError as error:
                return self._write_here(str(error), plan, planner)
            reply = pickle.loads(self.process.ask(question, self._until))
        if isinstance(reply, _Unreadable):
            return self._write_here(reply.why, plan, planner)
        if isinstance(reply, _Failed):
            raise reply.again()
        vars(self.inner).update(vars(reply.writer))
        done: Future[list[WriteResult]] = Future()
        done.set_result(reply.results)
        return done

    def _write_here(self, why: str, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        _log.warning("stagereg: this checkpoint is written in the training process, since %s", why)
        return self.inner.write_data(plan, planner)


class _NotPortableError(Exception):
    """The write cannot be put into a message."""


class _Sending:
    """The tensors of one question, held until it is answered."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._copier: HostCopier | None = None

    def __enter__(self) -> _Sending:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.clear()
        if self._copier is not None:
            self._copier.close()

    def question(self, writer: StorageWriter, plan: SavePlan, planner: SavePlanner) -> bytes:
        data: list[int | bytes] = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, torch.Tensor):
                if not is_plain(value):
                    raise _NotPortableError(f"{item.index.fqn!r} is no plain tensor in host memory")
                data.append(len(self._held))
                self._held.append(value.detach())
            else:
                data.append(value.getvalue())
        bundle, outside = pack(self._held)
        if outside:
            bundle = self._bring_in(outside)
        try:
            return pickle.dumps(_Question(writer, plan, bundle, data), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise _NotPortableError(f"{type(writer).__name__} or its plan cannot be pickled ({error})") from error

    def _bring_in(self, outside: list[int]) -> TensorBundle:
        try:
            self._copier = HostCopier(Pool(keep=False, pin=False, make=SharedBlock))
            copies = self._copier.copy([self._held[i] for i in outside])
        except (StagingError, StagerClosedError) as error:
            raise _NotPortableError(str(error)) from error
        for i, copy in zip(outside, copies, strict=True):
            self._held[i] = copy
        bundle, still_outside = pack(self._held)
        assert not still_outside
        return bundle


# -- the other side


def answer(question: bytes) -> bytes:
    """Do one write and return its result, which may be an error. Called in the process that writes."""
    try:
        asked: _Question = pickle.loads(question)
        tensors = unpack(asked.bundle)
    except Exception as error:
        return pickle.dumps(_Unreadable(f"the writer process cannot read it ({type(error).__name__}: {error})"))
    try:
        values = [data if isinstance(data, bytes) else tensors[data] for data in asked.data]
        items = zip(asked.plan.items, values, strict=True)
        planner = _Resolved({_key(item): value for item, value in items})
        results = asked.writer.write_data(asked.plan, planner).wait()
        return pickle.dumps(_Written(asked.writer, results), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # or the process would end, and another one be asked the same
        return pickle.dumps(_Failed(portable(error), _related(error.__cause__), _related(error.__context__)))


def _related(error: BaseException | None) -> BaseException | None:
    return None if error is None else portable(error)


_Key = tuple[MetadataIndex, WriteItemType]


def _key(item: WriteItem) -> _Key:
    return item.index, item.type


class _Resolved(SavePlanner):
    """A planner that has everything resolved already and plans nothing."""

    def __init__(self, values: Mapping[_Key, torch.Tensor | bytes]) -> None:
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[_key(write_item)]
        return io.BytesIO(value) if isinstance(value, bytes) else value

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError
