"""What a run was made on, and whether it was quiet: figures without this mean nothing to anybody else."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["cores", "describe", "file_system", "noise_warning"]


def describe(device: str) -> dict[str, Any]:
    """Versions, processor, cores, the load before the run (1, 5 and 15 minutes), and on ``cuda`` device and driver."""
    import torch

    from stagereg._version import __version__

    told: dict[str, Any] = {
        "stagereg": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _processor(),
        "cores": cores(),
        "load": list(os.getloadavg()),
        "torch_threads": torch.get_num_threads(),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", ""),
    }
    if device != "cpu":
        told |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    return told


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def noise_warning(load: float, cores: int) -> str:
    """Return a line that says so if a 1-minute load average of ``load`` makes for noisy figures, or nothing."""
    if load <= cores / 2:
        return ""
    return f"The machine is busy (load {load:.1f} on {cores} cores): the figures will be noisy."


def file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is on, such as ``"ext4"``; empty if the machine does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    path = folder.resolve()
    on = [(where, kind) for _, where, kind, *_ in mounts if path.is_relative_to(where)]
    return max(reversed(on), key=lambda mount: len(mount[0]))[1] if on else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
