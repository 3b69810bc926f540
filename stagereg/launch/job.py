"""Sets up the environment of a rank's job: the rendezvous store, the process group, and the event record."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
from stagereg.base.address import is_one_machine, listen, loopback
from stagereg.errors import LaunchError
from stagereg.launch.extension import answers, mark, rank_extensions
from stagereg.launch.run_store import GATHER_S, await_key

log = logging.getLogger(__name__)


def open_store(rank: int, world_size: int) -> Any:
    """Connect to the rendezvous store. Rank 0 opens the store if no launcher has. On one machine, use loopback."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    if is_one_machine() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = host = loopback()
        if rank == 0:
            port = int(os.environ["MASTER_PORT"])
            with contextlib.suppress(OSError):  # torch then reports the error, or connects to a store on this port
                own: Any = {"multi_tenant": True, "master_listen_fd": listen(host, port).detach()}
                return TCPStore(host, port, world_size, True, default_pg_timeout, **own)
    return next(iter(rendezvous("env://")))[0]


def name_attempt(store: Any, rank: int, world_size: int) -> str:
    """Return a name for this start of the ranks, the same on all ranks and different from earlier starts on ``store``.

    torchelastic's restart count is not unique, because an agent does not count restarts that another agent causes.
    Therefore each process draws a number, and rank 0's number is the name. Rank 0 publishes the name under every number
    that was drawn, until all ranks have read the name. So no process reads the name of an earlier start.
    """
    mine = store.add("drawn", 1)
    if rank > 0:
        await_key(store, f"answer/{mine}", "rank 0 did not start")
        name: str = store.get(f"answer/{mine}").decode()
        store.add(f"received/{name}", 1)
        return name
    answered, deadline = 0, time.monotonic() + GATHER_S
    while (received := store.add(f"received/{mine}", 0)) < world_size - 1:
        drawn = store.add("drawn", 0)
        for number in range(answered + 1, drawn + 1):
            store.set(f"answer/{number}", str(mine))
        answered = drawn
        if time.monotonic() > deadline:
            raise LaunchError(f"only {received + 1} of {world_size} ranks started in {GATHER_S} s. Check all logs.")
        time.sleep(0.01)
    return str(mine)


def run_recorded(task: Callable[[Any], Any], cfg: Any, attempt: str = "") -> Any:
    """Run the job, and record its events and the name of the accelerator in the output directory of Hydra.

    ``attempt`` is the argument ``run`` of :func:`stagereg.base.record.recording`.
    """
    import torch
    import torch.distributed as dist
    from hydra.core.hydra_config import HydraConfig

    directory = Path(HydraConfig.get().runtime.output_dir)
    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    answers(rank_extensions(), lambda each: each.recording(str(directory), attempt, dist.get_rank()))
    with record.recording(directory, dist.get_rank(), dist.get_world_size(), attempt, **device):
        try:
            value = task(cfg)
        except BaseException as error:
            shutdown.note_failure(error)
            raise
        shutdown.finish()
    return value


@contextlib.contextmanager
def process_group(store: Any, rank: int, world_size: int, local_rank: int, local_world_size: int) -> Iterator[None]:
    """Initialise the process group for the job: gloo for CPU tensors, plus the backend of the accelerator."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # the caller of the job initialized it
        yield
        return
    if is_one_machine() and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would use the address of the hostname
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        # NCCL rejects a group in which ranks share a device.
        enough = local_world_size <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    mark("grouped")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def for_json(value: Any) -> Any:
    """Convert a value to JSON types, and a one-element tensor to a number; ``None`` if JSON cannot represent it."""
    try:
        return json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        log.warning("Rank 0 returned a %s, which JSON cannot represent: the job returns None.", type(value).__name__)
        return None
