"""Binds each rank to the CPUs of the NUMA node of its GPU, if the option ``numa`` is ``auto``.

Linux allocates memory on the node of the thread that touches it first. So staging memory is allocated on the node too.
The rank binds itself before it creates the process group: the main thread and other threads that exist, and so all
threads and processes that they start later. This works for ranks of the launcher, for restarted ranks, which may be
forked, and for ranks of torchrun. If a rank cannot be bound, it logs the reason and runs unbound.

The CPUs are those of ``AffinityMode.NODE`` of ``torch.numa.binding``. The public part of that module only configures
torchrun, so this module calls one of its private functions. Difference to torch: if the system does not report the node
of the GPU, the rank is not bound, instead of being bound to node 0.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from stagereg.errors import LaunchError
from stagereg.launch.extension import LaunchExtension, RankExtension, ThisRank

_log = logging.getLogger(__name__)
_DEVICES = Path("/sys/bus/pci/devices")


class NumaLauncher(LaunchExtension):
    """Checks the option, and makes a single rank a process of its own, because the program itself is not bound."""

    def check(self, cfg: Any) -> bool:
        return _is_on(cfg)


class NumaRank(RankExtension):
    """Binds this process before the rank runs its job."""

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        if _is_on(cfg):
            local_rank = int(os.environ.get("LOCAL_RANK", rank.rank))
            try:
                device, node, cpus = find_cpus(local_rank)
                bind(cpus)
                _log.info("Rank %d uses %d CPUs of NUMA node %d, the node of %s.", rank.rank, len(cpus), node, device)
            except (OSError, RuntimeError, AttributeError, ImportError) as error:
                if rank.store.is_first(f"numa: {error}"):  # otherwise another rank has logged the same reason
                    _log.warning("stagereg: numa=auto has no effect on rank %d: %s.", rank.rank, error)
        return nullcontext()


def find_cpus(local_rank: int) -> tuple[str, int, set[int]]:
    """Return the CUDA device of a rank, its NUMA node, and the CPUs of the node that this thread may use.

    Raises:
        RuntimeError: there is no such device, its node is unknown, or this thread may use no CPU of the node.
        ImportError, AttributeError, OSError: torch or the system does not provide the information.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")
    binding: Any = importlib.import_module("torch.numa.binding")
    index = local_rank % torch.cuda.device_count()  # as the launcher sets the device of the rank
    found: Any = torch.cuda.get_device_properties(index)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    node = int((_DEVICES / address / "numa_node").read_text())
    if node < 0:
        raise RuntimeError(f"the system does not report the NUMA node of cuda:{index}")
    cpus: set[int] = binding._get_allowed_logical_cpu_indices_for_numa_node(numa_node_index=node)
    if not cpus:
        raise RuntimeError(f"this process may use no CPU of NUMA node {node}, the node of cuda:{index}")
    return f"cuda:{index}", node, cpus


def bind(cpus: set[int]) -> None:
    """Bind this process to ``cpus``, except threads that are not bound like the calling thread. Raises: ``OSError``.

    Without ``OMP_NUM_THREADS``, torch has counted the CPUs before and computes on that many threads. So this function
    limits them to the number of ``cpus``.
    """
    import torch

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, cpus)
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), len(cpus)))


def _is_on(cfg: Any) -> bool:
    from omegaconf import OmegaConf  # imported here: ranks of programs without Hydra do not need it

    value = OmegaConf.select(cfg, "numa")
    if value not in (None, False, "off", "auto"):  # YAML reads an unquoted ``off`` as False
        raise LaunchError(f"numa must be off or auto, not {value}.")
    return bool(value == "auto")


launcher, rank = NumaLauncher, NumaRank
