"""A process that writes checkpoints, so that training and its interpreter have nothing to do with it.

Planning, and every collective of ``torch.distributed.checkpoint``, stays where it is; only ``write_data`` crosses over.
:class:`ProcessWriter` goes around any ``StorageWriter``: it sends the plan, the writer and a table of where the tensors
lie in shared memory to a :class:`WriterProcess`, and gets back the results and the writer as it is after the write. No
bytes of tensors are sent, provided that the stager shares its memory (``shared``).

The process has no process group and no port: it is reached over a socket pair. It is started fresh, with a lower
priority and without accelerators, and ends with its parent, even if that is killed. If it dies, at whatever moment,
another one is started and the write is done again, which is safe because files of an unfinished checkpoint are opened
anew. Nothing waits for it by the clock: a wait goes on while it lives and ends when it does not.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stagereg.errors import CheckpointError, StagerClosedError, StagingError
from stagereg.kernel.copy import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.kernel.parcel import Parcel, fits, pack, unpack
from stagereg.kernel.sharing import SharedArena

__all__ = ["ProcessWriter", "WriterProcess", "serve"]

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("=Q")
_CHUNK = 2**20
_LOOK_S = 0.5  # how often one looks whether the other side lives, should its end of the socket be open elsewhere
_END_S = 5.0
_START = (
    "import os, sys; os.nice(int(sys.argv[3])); sys.path[:] = sys.argv[4:]; "
    "from stagereg.checkpoint.process import serve; serve(int(sys.argv[1]), int(sys.argv[2])); "
    "sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"  # without a second of taking torch apart
)


class ProcessDiedError(CheckpointError):
    """The writer process died while it was asked something."""


class WriterProcess:
    """The process, seen from its parent. Methods may be called on any thread; one question at a time is answered.

    Args:
        niceness: how much lower its priority is than the parent's, from 0 to 19, so that training keeps its cores.

    Attributes:
        restarts: how often a dead one was replaced.
    """

    def __init__(self, niceness: int = 10) -> None:
        self.restarts = 0
        self._niceness = niceness
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None if there is none."""
        child = self._child
        return child.pid if child is not None and child.lives() else None

    def start(self) -> None:
        """Start it, if it does not run; takes milliseconds, and it is ready some seconds later.

        If it cannot be started, the next question tells.
        """
        with self._lock:
            try:
                self._running()
            except CheckpointError as error:
                _log.warning("stagereg: %s", error)

    def ask(self, question: bytes) -> bytes:
        """Send a question and return the answer.

        A process found dead is replaced. One that dies on the question is replaced once, and asked again.

        Raises:
            CheckpointError: the second one died as well, or it cannot be started, or after :meth:`close`.
        """
        with self._lock:
            try:
                return self._running().ask(question)
            except ProcessDiedError as death:
                _log.warning("stagereg: %s; another one is started and writes again", death)
            try:
                return self._running().ask(question)
            except ProcessDiedError as death:
                raise CheckpointError(
                    f"{death}, and so did the one before, on the same checkpoint. If the system ran out of memory, it "
                    "ends processes with SIGKILL: the kernel's log tells."
                ) from None

    def close(self) -> None:
        """End the process, after the question it has. Twice is harmless."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()
                self._child = None

    def _running(self) -> _Child:
        if self._closed:
            raise CheckpointError("This writer process was closed; construct another one.")
        if self._child is not None and not self._child.lives():
            self._child.end()
            self._child = None
            self.restarts += 1
        if self._child is None:
            self._child = _Child(self._niceness)
        return self._child


class _Child:
    """One child and the socket to it."""

    def __init__(self, niceness: int) -> None:
        here, there = socket.socketpair()
        # No accelerator: torch's writer would make a context there, which costs memory on the device.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = [str(there.fileno()), str(os.getpid()), str(niceness), *sys.path]
        with there:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    env=environment,
                )
            except OSError as error:
                here.close()
                raise CheckpointError(f"No process to write checkpoints could be started: {error}") from error
        self.pid = self._process.pid
        self._socket = here
        self._socket.settimeout(_LOOK_S)
        self._end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes) -> bytes:
        try:
            _send(self._socket, question, self.lives)
            return _receive(self._socket, self.lives)
        except (EOFError, OSError):
            # What is at the other end may be about to die: the next one must not meet it at the same files.
            self.end()
            raise ProcessDiedError(f"The process that writes checkpoints (pid {self.pid}) {self._fate()}") from None

    def end(self) -> None:
        self._end()

    def _fate(self) -> str:
        code = self._process.returncode
        if code is None:
            return "is stuck in the kernel"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, parent: int) -> None:
    if os.getpid() != parent:  # a forked child has the socket too, but the process is not its own
        connection.close()
        return
    with contextlib.suppress(OSError), connection:
        connection.shutdown(socket.SHUT_RDWR)  # reaches the process also where a forked child has the socket too
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # in a system call that nothing ends, such as on a dead network drive
            _log.error("stagereg: the writer process %d cannot be ended", process.pid)


def _send(connection: socket.socket, message: bytes, lives: Callable[[], bool]) -> None:
    for part in (_LENGTH.pack(len(message)), message):
        rest = memoryview(part)
        while rest:
            try:
                rest = rest[connection.send(rest[:_CHUNK]) :]
            except TimeoutError:
                if not lives():
                    raise EOFError from None


def _receive(connection: socket.socket, lives: Callable[[], bool]) -> bytes:
    (nbytes,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size, lives))
    return _receive_bytes(connection, nbytes, lives)


def _receive_bytes(connection: socket.socket, nbytes: int, lives: Callable[[], bool]) -> bytes:
    parts: list[bytes] = []
    while nbytes:
        try:
            part = connection.recv(min(nbytes, _CHUNK))
        except TimeoutError:
            if not lives():
                raise EOFError from None
            continue
        if not part:
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


# -- what is said


@dataclass
class _Question:
    """One ``write_data``: of each item of the plan, a number of a tensor in the parcel, or bytes."""

    writer: StorageWriter
    plan: SavePlan
    parcel: Parcel
    data: list[int | bytes]


@dataclass
class _Written:
    writer: StorageWriter
    results: list[WriteResult]


@dataclass
class _Failed:
    """The error, and those it was raised from and while handling; what cannot be pickled as text."""

    error: Exception
    cause: Exception | None
    context: Exception | None

    def again(self) -> Exception:
        self.error.__cause__, self.error.__context__ = self.cause, self.context
        return self.error


@dataclass
class _Unreadable:
    """The question could not be understood there."""

    why: str


class ProcessWriter(StorageWriter):
    """A storage writer whose ``write_data`` runs in another process; all else is done by the writer inside, here.

    The writer inside is pickled for each write, and takes over the state it had there afterwards. What cannot go
    across (a writer whose class the process cannot import, a tensor that is no plain one on the CPU) is written here,
    and one log line says why. Tensors that do not lie in shared memory are copied there first.

    Args:
        inner: the writer; a storage of this project or any of torch's.
        process: where it writes; several writers may share it.

    Example::

        process = WriterProcess()
        dcp.save(copy, storage_writer=ProcessWriter(FileSystemWriter(path), process))
    """

    def __init__(self, inner: StorageWriter, process: WriterProcess) -> None:
        self.inner = inner
        self.process = process
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
        """Have the process write the items of ``plan``; returns when it has.

        Raises:
            CheckpointError: the process died twice.
            Exception: what the writer raised there; a type that cannot be pickled is a ``RuntimeError`` of its text.
        """
        with _Sending() as sending:
            try:
                question = sending.question(self.inner, plan, planner)
            except _NotPortableError as error:
                return self._write_here(str(error), plan, planner)
            answer = pickle.loads(self.process.ask(question))
        if isinstance(answer, _Unreadable):
            return self._write_here(answer.why, plan, planner)
        if isinstance(answer, _Failed):
            raise answer.again()
        vars(self.inner).update(vars(answer.writer))
        done: Future[list[WriteResult]] = Future()
        done.set_result(answer.results)
        return done

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
                if not fits(value):
                    raise _NotPortableError(f"{item.index.fqn!r} is no plain tensor in host memory")
                data.append(len(self._held))
                self._held.append(value.detach())
            else:
                data.append(value.getvalue())
        parcel, outside = pack(self._held)
        if outside:
            parcel = self._bring_in(outside)
        try:
            return pickle.dumps(_Question(writer, plan, parcel, data), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise _NotPortableError(f"{type(writer).__name__} or its plan cannot be pickled ({error})") from error

    def _bring_in(self, outside: list[int]) -> Parcel:
        try:
            self._copier = HostCopier(Pool(keep=False, pin=False, make=SharedArena))
            copies = self._copier.copy([self._held[i] for i in outside])
        except (StagingError, StagerClosedError) as error:
            raise _NotPortableError(str(error)) from error
        for i, copy in zip(outside, copies, strict=True):
            self._held[i] = copy
        parcel, still_outside = pack(self._held)
        assert not still_outside
        return parcel


# -- the other side


def serve(descriptor: int, parent: int) -> None:
    """Answer what comes over the socket until it is closed. The main function of the process.

    Args:
        descriptor: of this side's end of the socket.
        parent: process id; when that process ends, this one does at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C it is the parent who decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as connection:
        try:
            while True:
                # In one expression: no variable may hold on to the tensors once the answer is on its way.
                _send(connection, _answer(_receive(connection, _always)), _always)
        except (EOFError, OSError):
            return


def _always() -> bool:
    return True


def _end_with(parent: int) -> None:
    # Not PR_SET_PDEATHSIG, which means the thread that started this process and not the process.
    if hasattr(os, "pidfd_open"):
        try:
            alive = os.pidfd_open(parent)
        except OSError:
            pass
        else:
            if os.getppid() == parent:
                select.select([alive], [], [])
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(1)


def _answer(message: bytes) -> bytes:
    try:
        question: _Question = pickle.loads(message)
        tensors = unpack(question.parcel)
    except Exception as error:
        return pickle.dumps(_Unreadable(f"the writer process cannot read it ({type(error).__name__}: {error})"))
    try:
        values = [data if isinstance(data, bytes) else tensors[data] for data in question.data]
        items = zip(question.plan.items, values, strict=True)
        planner = _Resolved({_key(item): value for item, value in items})
        results = question.writer.write_data(question.plan, planner).wait()
    except Exception as error:
        return pickle.dumps(_Failed(_portable(error), _related(error.__cause__), _related(error.__context__)))
    return pickle.dumps(_Written(question.writer, results), pickle.HIGHEST_PROTOCOL)


def _related(error: BaseException | None) -> Exception | None:
    return _portable(error) if isinstance(error, Exception) else None


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


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
