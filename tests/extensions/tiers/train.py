"""A training run for tests of tiers: it notes what its state is at each step, and checks what it restores by that.

Arguments are ``name=value``: ``tier``, ``dir`` of the tier, ``store`` (a directory or ``null``), ``every`` and
``store_every`` in steps, ``copies``, ``steps``, ``more`` (steps after the start, in place of ``steps``), ``shard``
(``fsdp2`` or ``ddp``), ``step_s``, ``hold`` (a step after which it waits to be killed), ``truth`` (the shared folder of
what was), ``resume``, ``calm`` (whether each step waits for all copies), ``max_crashes`` (0 for never), ``failpoint``
(``NAME:RANK:COUNT``, where a rank ends itself).
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import stagereg
from stagereg.checkpoint.store import failpoints

USUAL = {"tier": "memory", "dir": "/dev/shm/t", "store": "null", "every": "2", "store_every": "1000", "copies": "1"}
USUAL |= {"steps": "12", "shard": "fsdp2", "step_s": "0.05", "hold": "0", "resume": "auto", "failpoint": ""}
USUAL |= {"more": "", "width": "64", "calm": "false", "max_crashes": "3"}


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a checksum of all parameters and moments, as whole tensors. Collective."""
    found = hashlib.sha256()
    moments = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    for each in (*model.parameters(), *moments):
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def note(place: Path, text: str) -> None:
    """Write a file of the shared folder, in one step."""
    beside = place.with_name(f".{place.name}")
    beside.write_text(text)
    beside.replace(place)


def own_digest(own: torch.Tensor) -> str:
    """Return a checksum of what this rank has for itself: a value, and the state of its random numbers."""
    return hashlib.sha256(own.numpy().tobytes() + torch.get_rng_state().numpy().tobytes()).hexdigest()


def wait_for_copies(checkpointer: stagereg.Checkpointer) -> None:
    """Wait until no rank sends copies, so that the next save is not passed over. Collective."""
    checkpointer.wait()
    ends = time.monotonic() + 60
    while any(each.name == "stagereg-tier-copy" for each in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    dist.barrier()


def watch(given: str, rank: int) -> None:
    """End this process at a failpoint."""
    name, which, count = given.split(":")
    left = [int(count)]

    def observe(point: str) -> None:
        if point == name and int(which) == rank:
            left[0] -= 1
            if left[0] == 0:
                print(f"ENDS at {given}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.watch(observe)


def main(options: dict[str, str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    dist.init_process_group("gloo")
    rank, truth = dist.get_rank(), Path(options["truth"])
    if options["failpoint"]:
        watch(options["failpoint"], rank)
    torch.manual_seed(0)
    width = int(options["width"])
    model: Any = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 7))
    model = fully_shard(model) if options["shard"] == "fsdp2" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    own = torch.zeros(1, dtype=torch.int64)
    state = {"model": model, "optimizer": optimizer, "own": stagereg.per_rank(own)}
    tier = options["tier"]
    if tier != "none":
        numbers = {name: int(options[name]) for name in ("every", "copies")}
        tier = stagereg.build("tier", tier, dir=options["dir"], **numbers)
    store = None if options["store"] == "null" else options["store"]
    with stagereg.Checkpointer(
        store,
        every=int(options["store_every"]),
        resume=options["resume"],
        tier=tier,
        keep=100,
        restore=stagereg.Restore(max_crashes=int(options["max_crashes"]) or None),
    ) as checkpointer:
        began = time.monotonic()
        start = checkpointer.restore(state)
        seconds = time.monotonic() - began
        if start is not None:
            was, size = (truth / str(start)).read_text().split()
            assert digest(model, optimizer) == was, f"step {start} is not what was saved"
            if int(size) == dist.get_world_size():
                own_was = (truth / f"own-{start}-{rank}").read_text()
                assert own_digest(own) == own_was, f"what rank {rank} has for itself is not of step {start}"
        if rank == 0:
            print(f"RESTORED {start} from {checkpointer.restored} in {seconds:.2f} s", flush=True)
        last = (start or 0) + int(options["more"]) if options["more"] else int(options["steps"])
        for step in range((start or 0) + 1, last + 1):
            x = torch.full((4, width), float(step + rank), dtype=torch.float32)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            own += 1 + torch.randint(9, (1,))
            now = digest(model, optimizer)
            note(truth / f"own-{step}-{rank}", own_digest(own))
            if rank == 0:
                note(truth / str(step), f"{now} {dist.get_world_size()}")
            checkpointer.maybe_save(step, state)
            if options["calm"] == "true":
                wait_for_copies(checkpointer)
            time.sleep(float(options["step_s"]))
            if step == int(options["hold"]):
                wait_for_copies(checkpointer)
                print(f"HOLDS at {step}", flush=True)
                time.sleep(1000)
    print(f"ENDED with {checkpointer.stats}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(USUAL | dict(each.split("=", 1) for each in sys.argv[1:]))
