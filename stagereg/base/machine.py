"""The machine of a run: its name, cores, memory and file systems, and a setting of the C library for fast staging.

glibc's ``memmove`` bypasses the cache (non-temporal stores) only above a threshold that depends on the size of the
shared cache: 99 MiB on a machine with a cache of 258 MiB. A staged copy is not read again soon, so bypassing the cache
nearly halves the copy time of a few MiB on two threads. The threshold can only be set before a process starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
_THRESHOLD_BYTES = 2**20
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
MOUNTS = Path("/proc/self/mounts")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs|ceph|cifs|smb\w*|9p|afs|ocfs2|gfs2|orangefs|pvfs2|panfs|wekafs|glusterfs|virtiofs"
    r"|fuse\.(?!fuse-overlayfs).*"
)


def tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that speed up staging; empty if unsupported, or if the user has set them."""
    before = environment.get(TUNABLES, "")
    if platform.machine() != "x86_64" or _THRESHOLD in before:
        return {}
    return {TUNABLES: ":".join(filter(None, (before, f"{_THRESHOLD}={_THRESHOLD_BYTES:#x}")))}


def become_a_rank(*command: str) -> None:
    """Set the environment variables of a rank and run Python again with ``command``, unless they are already set."""
    missing = tunables(os.environ)
    if missing:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *command], {**os.environ, **missing})


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its ``parent`` process exits for any reason (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def memory(figure: str) -> int:
    """Return a field of ``/proc/self/status``, such as ``"VmRSS"``, in bytes. Raises: ``OSError``, ``LookupError``."""
    status = Path("/proc/self/status").read_text(errors="replace")
    return int(re.findall(rf"^{figure}:\s+(\d+)", status, re.M)[0]) * 1024


def cores() -> int:
    return len(os.sched_getaffinity(0))


def ranks_here(world_size: int) -> int:
    """Return this machine's number of ranks from the launcher's environment variables; ``world_size`` if unknown."""
    variables = os.environ
    if "LOCAL_WORLD_SIZE" in variables:
        return int(variables["LOCAL_WORLD_SIZE"])
    counts = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")  # e.g. 4(x2),3
    tasks = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    machine = int(variables.get("SLURM_NODEID", -1))
    if sum(tasks) == world_size and 0 <= machine < len(tasks):
        return tasks[machine]
    if variables.get("SLURM_NTASKS") == str(world_size):
        return min(world_size, int(variables.get("SLURM_NTASKS_PER_NODE", world_size)))
    return world_size


def boot_id() -> str:
    """Return an ID that changes with each reboot of this machine; empty if the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def machine_name() -> str:
    """Return a name that two processes share if, and only if, they see the same disks and process IDs."""
    try:
        seen = f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        seen = f"{uuid.getnode()}"
    return f"{socket.gethostname()} {seen}"


def file_system(folder: Path) -> str:
    """Return the file system type of ``folder``, such as ``"ext4"``; empty if the system does not report it."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    fields = [line.split(" ") for line in lines]
    types = {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount): kind for _, mount, kind, *_ in fields}
    path = folder.resolve()
    return next((types[str(each)] for each in (path, *path.parents) if str(each) in types), "")


def is_on_network(folder: Path) -> bool:
    """Return whether ``folder`` is in a network file system, by the type of its mount."""
    return _NETWORK.fullmatch(file_system(folder)) is not None
