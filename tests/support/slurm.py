"""A real Slurm cluster on the machines of the lab: the controller on the first one, a node daemon on each other.

All that it keeps lies below one folder, which the machines share, and ends with the lab. Needs Debian's ``slurm-wlm``
and ``munge`` beside what the lab needs: else the test is skipped, with the reason. Nodes pretend to have more cores
than there are. A partition ``urgent`` takes nodes from jobs of ``train``, which go back into the queue.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from .lab import CHECKOUT, Lab, Machine, Process
from .programs import comes_true

GRACE_S = 20
"""Seconds that a job has after SIGTERM where another one takes its nodes."""
KILL_S = 10
"""Likewise at its own end (``scancel``, the end of its time)."""
_SECONDS = 60.0  # for one command of Slurm, on a busy machine
_TOOLS = ("slurmctld", "slurmd", "munged", "sbatch")
_CONFIG = """
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
AuthInfo=socket=/run/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd-spool
MailProg=/bin/true
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_s}
SlurmdTimeout=20
ReturnToService=2
NodeName={nodes} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} DefMemPerCPU=100
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF DefMemPerCPU=100
"""


class Slurm:
    """The cluster; made and removed by ``with``, in a folder of its own."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self.lab = folder, Lab(machines=1 + nodes)
        self._daemons: dict[str, Process] = {}

    def __enter__(self) -> Self:
        if reason := missing():
            pytest.skip(reason)
        self.lab.__enter__()
        try:
            self.controller, *self.nodes = self.lab.machines
            self._configure()
            for machine in self.lab.machines:
                self.start_munge(machine)
            self._start(self.controller, "slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self.await_state("idle", *self.nodes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.__exit__()

    def run(self, *command: str, cwd: Path | None = None, may_fail: bool = False) -> str:
        """Run a command on the controller, where users log in, and return what it prints."""
        process = self.start(command, cwd)
        code = process.wait(_SECONDS)
        assert may_fail or code == 0, f"{' '.join(command)}: {process.output}"
        return process.output

    def start(self, command: Sequence[str], cwd: Path | None = None) -> Process:
        """Start a command there."""
        return self.controller.start(command, self._variables, cwd or self.folder)

    def submit(self, script: Path, *options: str) -> str:
        """Return the number of the job."""
        printed = self.run("sbatch", "--parsable", *options, str(script), cwd=script.parent)
        return printed.split("\n")[-2].split(";")[0]

    def state(self, job: str) -> str:
        """Return the state of a job (``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ...)."""
        return self.fields(job).get("JobState", "")

    def fields(self, job: str) -> dict[str, str]:
        """Return what Slurm shows of a job."""
        words = self.run("scontrol", "show", "job", "--oneliner", job, may_fail=True).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_job(self, job: str, *states: str, seconds: float = 180.0) -> None:
        """Wait until a job is in one of these states."""
        assert comes_true(lambda: self.state(job) in states, seconds), f"{self.fields(job)}\n{self.story()}"

    def await_state(self, state: str, *nodes: Machine) -> None:
        """Wait until nodes are in this state, of ``sinfo``."""

        def are() -> bool:
            found = self.run("sinfo", "--noheader", "--Node", "--partition=train", "--format=%N %T", may_fail=True)
            return {f"{node.name} {state}" for node in nodes} <= {*found.split("\n")}

        assert comes_true(are, _SECONDS), self.run("sinfo", "--list-reasons", "--long", may_fail=True) + self.story()

    def start_munge(self, machine: Machine) -> None:
        """Start what proves to others who somebody is."""
        options = ("--foreground", "--force", f"--key-file={self.folder}/munge.key", "--socket=/run/munge.sock")
        files = ("--pid-file=/run/munged.pid", "--log-file=/run/munged.log", "--seed-file=/run/munged.seed")
        self._start(machine, "munged", *options, *files)

    def start_node(self, node: Machine) -> None:
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-N", node.name)

    def stop(self, machine: Machine, daemon: str) -> None:
        """Kill a daemon of a machine."""
        self._daemons.pop(f"{machine.name} {daemon}").kill()

    def story(self) -> str:
        """Return the ends of what the daemons have printed."""
        return "\n".join(f"--- {name}\n{each.output[-3000:]}" for name, each in self._daemons.items())

    @property
    def _variables(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path, "PYTHONPATH": str(CHECKOUT)}

    def _configure(self) -> None:
        key, names = self.folder / "munge.key", ",".join(node.name for node in self.nodes)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        given = {"kill_s": KILL_S, "grace_s": GRACE_S, "controller": self.controller.name}
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder, nodes=names, **given))

    def _start(self, machine: Machine, daemon: str, *options: str) -> None:
        command = ["sh", "-c", 'mkdir -p /run/slurmd /run/slurmd-spool && exec "$@"', "sh", daemon, *options]
        self._daemons[f"{machine.name} {daemon}"] = machine.start(command, self._variables, self.folder)


def missing() -> str:
    """Return why no cluster can be made here, or nothing."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"a Slurm cluster cannot be made: this machine lacks {', '.join(absent)}" if absent else ""


def version() -> str:
    """Return Slurm's version."""
    return subprocess.run(["slurmd", "-V"], capture_output=True, text=True, timeout=_SECONDS).stdout.strip()
