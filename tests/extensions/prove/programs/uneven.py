"""Trains on uneven inputs with ``stagereg.main``: rank 1 has no data left one step after the save of step 8.

python uneven.py dir=DIR steps=12
"""

import torch
import torch.distributed as dist
from common import OPTIONS, write_results
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg


@stagereg.main(config_path="conf", config_name="uneven")
def train(cfg):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [torch.randn(4, 8) for _ in range(9 if rank else 12)][: cfg.steps]
    state = {"model": model, "optimizer": optimizer}
    join = stagereg.instantiate(cfg.join, model=model, optimizer=optimizer)
    with stagereg.Checkpointer(cfg.dir, **OPTIONS) as checkpointer, join:
        step = checkpointer.restore(state) or 0
        for x in join.iterate(batches[step:]):
            optimizer.zero_grad()
            join.mean((model(x) - x.roll(1, 1)).square().sum(), len(x)).backward()
            optimizer.step()
            step += 1
            checkpointer.maybe_save(step, state)
    write_results(cfg, model=model.module)


if __name__ == "__main__":
    train()
