"""A program that Ray Train runs in its workers, with Hydra's config; ``fails`` of it says which are to fail, and how.

Each rank appends what it does to ``rank-N.txt`` in the run's directory; what the model is at the end is rank 0's value.
"""

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import stagereg
from stagereg.checkpoint.store.failpoints import watch
from stagereg.integrations.ray import on_ranks, report, run_config


def note(text: str) -> None:
    directory = Path(HydraConfig.get().runtime.output_dir)
    with open(directory / f"rank-{dist.get_rank()}.txt", "a") as file:
        file.write(text + "\n")


def fail(cfg: Any, at: object) -> None:
    """Fail as the config says, each once: ``step:rank:how``, or the moment of a save in place of the step."""
    for each in filter(None, cfg.fails.split("+")):
        when, rank, how = each.split(":")
        mark = Path(HydraConfig.get().runtime.output_dir, f"failed-{when}")
        if str(at) == when and dist.get_rank() == int(rank) and not mark.exists():
            mark.touch()
            if how == "error":
                raise ValueError("bad sample 7")
            os.kill(os.getpid(), getattr(signal, how))


def train(cfg: Any) -> float:
    watch(partial(fail, cfg))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        start = checkpointer.restore(state) or 0
        listed = [Path(each.checkpoint.path).name for each in ray.train.get_all_reported_checkpoints()]
        note(f"begins at {start} on {socket.gethostname()} from {checkpointer.restored} with {' '.join(listed)}")
        for step in range(start + 1, cfg.steps + 1):
            fail(cfg, step)
            loss = model(torch.full((2, 4), step / 10.0)).square().mean()
            loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(cfg.seconds)
            checkpointer.maybe_save(step, state)
            report({"step": step, "loss": loss.item()}, checkpointer)
    note("ends")
    return float(sum(each.detach().double().sum() for each in model.parameters()))


@hydra.main(config_path="ray_conf", config_name="job", version_base="1.3")
def main(cfg: Any) -> float:
    trainer = TorchTrainer(
        on_ranks(train, cfg),
        scaling_config=ScalingConfig(
            num_workers=cfg.nproc, resources_per_worker={"CPU": 1}, placement_strategy=cfg.spread
        ),
        run_config=run_config(failure_config=FailureConfig(max_failures=cfg.restarts)),
    )
    result = trainer.fit()
    checkpoint = result.checkpoint and result.checkpoint.path
    print(f"RESULT {result.return_value!r} {checkpoint} {result.metrics}", flush=True)
    return result.return_value


if __name__ == "__main__":
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=3, object_store_memory=80_000_000, include_dashboard=False)
    main()
