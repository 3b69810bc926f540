"""A training run that keeps a ledger: a program for :mod:`tests.benchmarks.failures`, which fails it, and a user's.

Each rank adds lines of JSON to ``ledger/RANK``: which samples a step is about to be trained on, and a checksum of model
and optimizer after it. Where a file ``at POINT`` lies in ``cfg.folder``, the rank that comes there first says so and
waits a little, so that something can be done to it at that moment.
"""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import stagereg
from stagereg.checkpoint.format.manifest import MANIFEST
from stagereg.checkpoint.store import failpoints
from stagereg.data import ResumableSampler

LENGTH, SIZE, SEED, WIDTH = 96, 2, 3, 8
EPOCHS = 1000
WAIT_S = 1.0  # at a point, for what is to happen there
FOLDER = Path(os.environ.get("LEDGER", "."))
OWN = {"rank": int(os.environ.get("RANK", -1)), "pid": os.getpid(), "host": socket.gethostname()}


def tell(**line: Any) -> None:
    """Add a line to the ledger."""
    data = json.dumps({**OWN, "t": time.time(), **line}) + "\n"
    file = os.open(FOLDER / "ledger" / str(OWN["rank"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, data.encode())
    os.close(file)


def reach(point: str) -> None:
    """Come to a point, and wait there if that was asked for."""
    try:
        (FOLDER / f"at {point}").rename(FOLDER / "reached")
    except OSError:
        return
    tell(reached=point)
    until = time.monotonic() + WAIT_S
    while (FOLDER / "reached").exists() and time.monotonic() < until:
        time.sleep(0.005)


class Sampler(ResumableSampler):
    """One whose state is restored at a point."""

    def load_state_dicts(self, *given: Any) -> None:
        reach("restoring")
        super().load_state_dicts(*given)


def checksum(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return that of all parameters, and of the optimizer's state."""
    found = 0
    for p in model.parameters():
        for each in (p.detach(), *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq", "step"))):
            found = zlib.crc32(each.numpy().tobytes(), found)
    return found


def is_last(step: int) -> bool:
    """Whether the run ends with this step, which is told early enough for all ranks to see it."""
    try:
        return step >= int((FOLDER / "end").read_text())
    except (OSError, ValueError):
        return False


def source_of(checkpointer: stagereg.Checkpointer) -> str:
    """Say what a run has gone on from."""
    if checkpointer.restored is None:
        return "nothing"
    place = Path(checkpointer.restored)
    if not place.is_relative_to(FOLDER):
        return "tier"
    return "survivors' save" if json.loads((place / MANIFEST).read_text()).get("lost") else "store"


@stagereg.main(config_path="conf", config_name="app")
def train(cfg: Any) -> None:
    torch.manual_seed(0)
    # One parameter: with more DDP arranges them anew after its first step, and sums of three ranks are other ones then.
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(range(LENGTH), seed=SEED, drop_last=True)
    loader = DataLoader(range(LENGTH), SIZE, sampler=sampler)
    state = {"model": model.module, "optimizer": optimizer, "sampler": sampler}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        step = checkpointer.restore(state) or 0
        attempt = [time.time_ns()]
        dist.broadcast_object_list(attempt)
        OWN["attempt"] = attempt[0]
        tell(start=step, size=dist.get_world_size(), source=source_of(checkpointer))
        for batch in sampler.batches(loader, EPOCHS):
            step += 1
            reach("step")
            tell(step=step, samples=batch.tolist())
            model(data[batch]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tell(step=step, checksum=checksum(model, optimizer))
            time.sleep(cfg.step_s)
            checkpointer.maybe_save(step, state)
            if is_last(step):
                break
    tell(ended=step, checksum=checksum(model, optimizer))


if __name__ == "__main__":
    if OWN["rank"] >= 0:
        reach("start")
        failpoints.watch(reach)
    train()
