"""Trains a model that FSDP2 shards over the ranks."""

import torch
import torch.distributed as dist
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.distributed.fsdp import fully_shard

import stagereg


def main():
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    state = {"model": model, "optimizer": optimizer}
    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, args.steps + 1):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (model(x) - x.roll(1, 1)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            checkpointer.maybe_save(step, state)
    write_results(args, **{name: each.full_tensor() for name, each in model.state_dict().items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
