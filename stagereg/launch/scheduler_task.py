"""This process as one of several tasks of a scheduler's job, each of which starts the ranks of its machine.

``hydra/launcher=submitit_slurm hydra.launcher.nodes=4`` has submitit run one job of a sweep on four machines at once.
The tasks meet on the machine of the first one, at a port derived from the job's number, and their ranks are one run.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

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
