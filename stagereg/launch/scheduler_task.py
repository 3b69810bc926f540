"""This process as one of several tasks of a scheduler's job, each of which starts the ranks of its machine.

``hydra/launcher=submitit_slurm hydra.launcher.nodes=4`` has submitit run one job of a sweep on four machines at once.
The tasks meet on the machine of the first one, at a port derived from the job's number, and their ranks are one run.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

__all__ = ["SchedulerTask"]

_PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections."""


@dataclass(frozen=True)
class SchedulerTask:
    """One of ``count`` tasks.

    Attributes:
        index: from 0; the ranks of task 0 come first.
        count: two or more.
        machines: how many of them the tasks are on.
        job: the scheduler's name for the job.
        endpoint: host and port where task 0 waits for the others.
    """

    index: int
    count: int
    machines: int
    job: str
    endpoint: str

    @classmethod
    def current(cls) -> SchedulerTask | None:
        """The task that submitit has made of this process; ``None`` outside submitit, or if it is the only task."""
        if "SUBMITIT_EXECUTOR" not in os.environ:
            return None
        from submitit import JobEnvironment

        try:
            here = JobEnvironment()
        except RuntimeError:  # the variable comes from a job that has started this process
            return None
        if here.num_tasks < 2:
            return None
        host = here.hostnames[0] if here.num_nodes > 1 else "127.0.0.1"
        port = _PORTS[zlib.crc32(here.job_id.encode()) % len(_PORTS)]
        return cls(here.global_rank, here.num_tasks, here.num_nodes, here.job_id, f"{host}:{port}")
