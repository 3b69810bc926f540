"""This process as one of several tasks of a scheduler's job, each of which starts the ranks of its machine.

``hydra/launcher=submitit_slurm hydra.launcher.nodes=4`` has submitit run one job of a sweep on four machines at once.
The tasks meet on the machine of the first one, at a port derived from the job's number, and their ranks are one run.
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

_PORTS = range(20_000, 32_000)  # below those that systems give to outgoing connections


@dataclass(frozen=True)
class SchedulerTask:
    """One of ``count`` tasks; by default the only one."""

    index: int = 0  # from 0; the ranks of task 0 come first
    count: int = 1
    host: str = "127.0.0.1"  # where task 0 waits for the others; the default where all are on one machine
    port: int = 0  # likewise; 0 for any that is free

    @property
    def is_one_machine(self) -> bool:
        return self.host == SchedulerTask.host

    @classmethod
    def current(cls) -> SchedulerTask:
        """The task that submitit has made of this process; the only task if it has not."""
        if "SUBMITIT_EXECUTOR" not in os.environ:
            return cls()
        from submitit import JobEnvironment

        try:
            here = JobEnvironment()
        except RuntimeError:  # the variable comes from a job that has started this process
            return cls()
        host = here.hostnames[0] if here.num_nodes > 1 else cls.host
        port = _PORTS[zlib.crc32(here.job_id.encode()) % len(_PORTS)] if here.num_tasks > 1 else 0
        return cls(here.global_rank, here.num_tasks, host, port)


def open_store(task: SchedulerTask) -> Any:
    """The store of the run, which task 0 has, once all tasks have come to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, port, listener = timedelta(seconds=GATHER_S), task.port, None
    try:
        if task.index == 0 and task.is_one_machine:  # else torch listens on all interfaces
            opened = listen(task.host, task.port)
            port, listener = opened.getsockname()[1], opened.detach()
        begins = {"timeout": limit, "wait_for_workers": False, "master_listen_fd": listener}
        store: Any = TCPStore(task.host, port, is_master=task.index == 0, **begins)  # type: ignore[arg-type]
        meet(store, task, "started", GATHER_S)
    except (RuntimeError, OSError) as error:
        where = f"the {task.count} tasks of the job have not met at {task.host}:{task.port} in {GATHER_S} s"
        raise LaunchError(f"{where}: {error}") from error
    return store


def meet(store: Any, task: SchedulerTask, what: str, limit_s: float) -> None:
    """Wait until all tasks have come here. Raises ``RuntimeError`` after ``limit_s`` seconds."""
    store.set(f"{what}/{task.index}", "")
    store.wait([f"{what}/{index}" for index in range(task.count)], timedelta(seconds=limit_s))
