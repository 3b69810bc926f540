"""Describes the machine and the versions of a measurement, and warns if the machine is busy."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from stagereg.base.machine import TUNABLES, cores
from stagereg.base.version import __version__


def describe(device: str) -> dict[str, Any]:
    """Return a dict with versions, processor, cores, load averages over 1, 5 and 15 minutes, and the GPU and driver."""
    import torch

    found: dict[str, Any] = {
        "stagereg": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _processor(),
        "cores": cores(),
        "load": list(os.getloadavg()),
        "torch_threads": torch.get_num_threads(),
        TUNABLES: os.environ.get(TUNABLES, ""),
    }
    if device != "cpu":
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    return found


def noise_warning(load: float, cores: int) -> str:
    """Return a warning if the load average ``load`` is above half the number of cores, otherwise an empty string."""
    if load <= cores / 2:
        return ""
    return f"The machine is busy (load {load:.1f} on {cores} cores): the results will be noisy."


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
