"""A process that writes checkpoints, so that writing takes no time of training and its interpreter.

:func:`write_data` has a storage's ``write_data`` done there; all else of a save stays where it is. What crosses over is
the plan, the storage and a table of where the tensors lie in shared memory, and back come the results and the storage
as it is after the write. No bytes are sent of tensors in shared memory, such as those of the stager ``shared``.

The process is reached over a pair of sockets, so it has no port. It is started fresh, with a lower priority, without
accelerators, and in a process group of its own, so that signals to the parent's group do not end it: it may still have
to write the last save. It ends with its parent, even if that is killed. If it dies, at whatever moment, another one is
started and asked again, which is safe because files of an unfinished checkpoint are opened anew. One that has not
written when the save's time is up is killed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from stagereg.checkpoint.rank_group import portable
from stagereg.crash_report import signal_name
from stagereg.errors import CheckpointError
from stagereg.stagers.shared_memory import is_plain
from stagereg.stagers.tensor_bundle import pack, unpack

__all__ = ["WriterProcess", "serve", "write_data"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often one looks whether the other side lives, should its end of the socket be open elsewhere
_END_S = 5.0
# Ends with its parent from the beginning on: importing torch takes seconds. Not by PR_SET_PDEATHSIG, which means the
# thread that started this process, and not by the end of the socket, which a forked child may have open as well.
_BEGIN = """
import os, signal, sys, threading, time

def end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)

threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # it is the parent who decides
    signal.signal(number, signal.SIG_IGN)
os.nice(10)  # so that training keeps its cores
sys.path[:] = sys.argv[3:]
"""
_SERVE = """
from stagereg.checkpoint.writer_process import serve
serve(int(sys.argv[1]))
"""
_PROGRAM = _BEGIN + _SERVE


def write_data(
    storage: StorageWriter, plan: SavePlan, planner: SavePlanner, process: WriterProcess, until: float = math.inf
) -> list[WriteResult]:
    """Write the items of ``plan`` through ``storage`` in ``process``; return when they are written.

    The storage is pickled for each write, and takes over the state that it had there afterwards. What cannot go across
    (a storage whose class the process cannot import, a tensor that is no plain one on the CPU) is written here, and the
    reason is logged.

    Raises as :meth:`WriterProcess.ask`, and what the storage raised; a type that cannot be pickled is a
    ``RuntimeError`` of its text.
    """
    values = [planner.resolve_data(item) for item in plan.items]  # held until the process has answered
    try:
        question = _question(storage, plan, values)
    except Exception as error:
        refused = f"{type(storage).__name__} or its plan cannot be pickled ({error})"
    else:
        refused, failure, written = pickle.loads(process.ask(question, until))
    if refused:
        _log.warning("stagereg: this checkpoint is written in the training process, since %s", refused)
        return storage.write_data(plan, planner).wait()
    if failure is not None:
        raise failure
    results: list[WriteResult] = written[0]
    vars(storage).update(vars(written[1]))
    return results


def _question(storage: StorageWriter, plan: SavePlan, values: list[torch.Tensor | io.BytesIO]) -> bytes:
    """Return one write as a message: storage, plan, a bundle of tensors, and each item's place in that or its data."""
    tensors = [value.detach() for value in values if isinstance(value, torch.Tensor)]
    if not all(map(is_plain, tensors)):
        raise TypeError("some tensors are no plain ones in host memory")
    bundle, outside = pack(tensors)
    places = iter(range(len(tensors)))
    data = [next(places) if isinstance(value, torch.Tensor) else value.getvalue() for value in values]
    own = {i: tensors[i].clone() for i in outside}  # a view is pickled with all the memory behind it
    return pickle.dumps((storage, plan, bundle, own, data), pickle.HIGHEST_PROTOCOL)


# -- in the process


def serve(descriptor: int) -> None:
    """Write what is asked for over a socket: the main function of the process, which is ended by its parent."""
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            # In one expression: no variable may hold on to a question once its answer is on its way.
            connection.send_bytes(_answer(connection.recv_bytes()))


def _answer(question: bytes) -> bytes:
    """Do one write. Return why it cannot be done here, an error, or the results and the storage."""
    try:
        storage, plan, bundle, own, data = pickle.loads(question)
        tensors = [own.get(i, x) for i, x in enumerate(unpack(bundle))]
    except Exception as error:
        return pickle.dumps((f"the writer process cannot read it ({type(error).__name__}: {error})", None, None))
    values = [each if isinstance(each, bytes) else tensors[each] for each in data]
    planner = _Resolved({item.index: value for item, value in zip(plan.items, values, strict=True)})
    try:
        return pickle.dumps(("", None, (storage.write_data(plan, planner).wait(), storage)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # or the process would end, and another one be asked the same
        return pickle.dumps(("", portable(error), None))


class _Resolved(DefaultSavePlanner):
    """A planner that has everything resolved already and plans nothing."""

    def __init__(self, values: Mapping[MetadataIndex, torch.Tensor | bytes]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value


# -- in its parent


class WriterProcess:
    """The process, seen from its parent. Methods may be called on any thread; one question at a time is answered.

    Constructing it starts the process, which is ready some seconds later. Raises ``CheckpointError`` if the system
    refuses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None if there is none."""
        return self._process.pid if self._process.poll() is None else None

    def ask(self, question: bytes, until: float = math.inf) -> bytes:
        """Send a question and return the answer, which is to come ``until`` then, on ``time.monotonic``.

        A process found dead is replaced. One that dies on the question is replaced once, and asked again. One that is
        late is killed, and the next question goes to another one.

        Raises ``CheckpointError``: the second one died as well, or one was late, or cannot be started, or is closed.
        """
        with self._lock:
            for trial in (1, 2):
                if self._closed:
                    raise CheckpointError("This writer process was closed; construct another one.")
                if self.pid is None:
                    self._end()
                    self._start()
                answer = self._answered(question, until)
                if answer is not None:
                    return answer
                what, code = f"The process that writes checkpoints (pid {self._process.pid})", self._process.returncode
                if time.monotonic() >= until or code is None:  # it may still write, so no other one may
                    state = "cannot be ended" if code is None else "was killed"
                    raise CheckpointError(f"{what} has not written in time and {state}. Its storage hangs, or is slow.")
                fate = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
                if trial == 1 and not self._closed:
                    _log.warning("stagereg: %s %s; another one is started and writes again", what, fate)
            raise CheckpointError(
                f"{what} {fate}, and so did the one before, on the same checkpoint. If the system ran out of memory, "
                "it ends processes with SIGKILL: see the kernel's log (dmesg)."
            )

    def close(self, now: bool = False) -> None:
        """End the process, after the question it has; or kill it ``now``. Twice is harmless."""
        if now:
            self._closed = True  # before the one who asks sees it die
            self._process.kill()
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        self._connection, there = Pipe()
        # No accelerator: torch's writer would make a context there, which costs memory on the device.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = [str(there.fileno()), str(os.getpid()), *sys.path]
        with there:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _PROGRAM, *arguments],  # unbuffered, since it is killed in the end
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    env=environment,
                    process_group=0,
                )
            except OSError as error:
                self._connection.close()
                raise CheckpointError(f"No process to write checkpoints could be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process, self._connection, os.getpid())

    def _answered(self, question: bytes, until: float) -> bytes | None:
        """Return the answer; ``None`` if the process has died, which it is made to when it is late."""
        left_s = until - time.monotonic() + _LOOK_S  # a little more, so that the save is known to be late by then
        kill = threading.Timer(max(0.0, min(left_s, threading.TIMEOUT_MAX)), self._process.kill)
        kill.daemon = True
        kill.start()
        try:
            self._connection.send_bytes(question)
            while not self._connection.poll(_LOOK_S):
                # One that not even a signal ends is left alone.
                if self.pid is None or time.monotonic() > until + _END_S:
                    raise EOFError
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._end()  # what is at the other end may be about to die: the next one must not meet it at the same files
            return None
        finally:
            kill.cancel()


def _end(process: subprocess.Popen[bytes], connection: Connection, parent: int) -> None:
    connection.close()
    if os.getpid() != parent:  # a forked child has the socket too, but the process is not its own
        return
    process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _log.error("stagereg: the writer process %d cannot be ended", process.pid)
