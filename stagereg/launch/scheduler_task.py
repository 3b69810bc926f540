"""Connects the tasks of a scheduler's job. Each task starts the ranks of its machine.

``hydra/launcher=submitit_slurm hydra.launcher.nodes=4`` makes submitit run each job of a sweep on four machines.
All tasks connect to the machine of the first task, at a port derived from the job ID. Their ranks form one run.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from stagereg.base.address import listen
from stagereg.errors import LaunchError
from stagereg.launch.run_store import GATHER_S

_PORTS = range(20_000, 32_000)  # below the ephemeral ports of outgoing connections


@dataclass(frozen=True)
class SchedulerTask:
    """One task of a scheduler's job, which has ``count`` tasks. The defaults describe a job with one task."""

    index: int = 0  # from 0; the ranks of task 0 come first
    count: int = 1
    host: str = "127.0.0.1"  # the address at which task 0 listens; the default if all tasks are on one machine
    port: int = 0  # the port at which task 0 listens; 0 for any free port

    @property
    def is_one_machine(self) -> bool:
        return self.host == SchedulerTask.host

    @classmethod
    def current(cls) -> SchedulerTask:
        """Return this process's task in a submitit job; outside submitit, the only task of a job."""
        if "SUBMITIT_EXECUTOR" not in os.environ:
            return cls()
        from submitit import JobEnvironment

        try:
            here = JobEnvironment()
        except RuntimeError:  # the variable is inherited from a job that started this process
            return cls()
        host = here.hostnames[0] if here.num_nodes > 1 else cls.host
        port = _PORTS[zlib.crc32(here.job_id.encode()) % len(_PORTS)] if here.num_tasks > 1 else 0
        return cls(here.global_rank, here.num_tasks, host, port)


def open_store(task: SchedulerTask) -> Any:
    """On task 0, open the rendezvous store; on others, connect to it. Returns when all tasks are connected."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, port, listener = timedelta(seconds=GATHER_S), task.port, None
    try:
        if task.index == 0 and task.is_one_machine:  # otherwise torch listens on all interfaces
            opened = listen(task.host, task.port)
            port, listener = opened.getsockname()[1], opened.detach()
        begins = {"timeout": limit, "wait_for_workers": False, "master_listen_fd": listener}
        store: Any = TCPStore(task.host, port, is_master=task.index == 0, **begins)  # type: ignore[arg-type]
        meet(store, task, "started", GATHER_S)
    except (RuntimeError, OSError) as error:
        where = f"the {task.count} tasks of the job did not all connect to {task.host}:{task.port} in {GATHER_S} s"
        raise LaunchError(f"{where}: {error}") from error
    return store


def meet(store: Any, task: SchedulerTask, what: str, limit_s: float) -> None:
    """Wait until all tasks have called this function. Raises: ``RuntimeError`` after ``limit_s`` seconds."""
    store.set(f"{what}/{task.index}", "")
    store.wait([f"{what}/{index}" for index in range(task.count)], timedelta(seconds=limit_s))
