"""What one rank of the multi-rank harness does, from its start to its end.

It runs in a process of its own, forked from a server that has only imported torch. What it has to tell goes into files
of the run's folder, so that a rank that dies has still said what it could: its result, its traceback, its output, its
stacks. This room assumes nothing about the function it runs, not even that it comes back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from stagereg.testing.transport import Shipment, unpack

__all__ = ["Assignment", "work"]


@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know; ``backend`` and ``pg_timeout_s`` (seconds) are the process group's."""

    rank: int
    world_size: int
    folder: Path
    shipment: Shipment
    working_directory: str
    environment: Mapping[str, str]
    backend: str
    store_port: int
    pg_timeout_s: float

    def file(self, kind: str) -> Path:
        """The file in which this rank tells its ``kind``: result, error, output or stacks."""
        return self.folder / f"{self.rank}.{kind}"


def work(job: Assignment) -> None:
    """Run the assigned function in an initialised process group and write down how it went."""
    os.setpgid(0, 0)
    _end_with_parent()
    with _said_to(job.file("output")), job.file("stacks").open("wb") as stacks:
        _tell_stacks_on_signal(stacks)
        os.environ.clear()
        os.environ.update(job.environment)
        os.chdir(job.working_directory)
        try:
            _call(job)
        except BaseException:
            job.file("error").write_text(_readable_traceback())
            sys.exit(1)


def _call(job: Assignment) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    fn, args, kwargs = unpack(job.shipment)
    limit = timedelta(seconds=job.pg_timeout_s)
    store = TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=limit)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
    # A group that one rank closes, or dies in, while another still connects to it, fails there.
    _await_all(store, "connected", job.world_size)
    try:
        job.file("result").write_bytes(pickle.dumps(fn(job.rank, job.world_size, *args, **kwargs)))
    except BaseException:
        store.add("ended", 1)
        raise
    _await_all(store, "ended", job.world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_all(store: Any, milestone: str, world_size: int) -> None:
    """Say that this rank is there, and wait for the others; who calls the harness bounds the wait."""
    store.add(milestone, 1)
    while store.add(milestone, 0) < world_size:
        time.sleep(0.002)


def _end_with_parent() -> None:
    """Let the kernel end this process when the caller's is gone, however it went.

    The caller holds the other end of the sentinel pipe; the closing of it raises SIGIO here, whose default is the end.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and hasattr(os, "O_ASYNC"):
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)


def _tell_stacks_on_signal(stacks: BinaryIO) -> None:
    # Chained to the default action, which ends the process: whoever waits for the end has the whole dump.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)
    faulthandler.enable(file=stacks, all_threads=True)


@contextlib.contextmanager
def _said_to(file: Path) -> Iterator[None]:
    """Send what this process says, in Python or below it, to a file."""
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # The server was started under whatever stdout the caller had; a file is not a terminal.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    yield
    sys.stdout.flush()
    sys.stderr.flush()


def _readable_traceback() -> str:
    """The current exception from the first frame outside this room."""
    kind, error, tb = sys.exc_info()
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(kind, error, tb))
