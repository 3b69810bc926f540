"""Trains with DDP on several ranks, each with its own data and its own generator for dropout.

Faults: ``momentum`` loads the state of the optimizer on rank 0 only. ``buffers`` does not broadcast the buffers of
batch normalization, and restores those of rank 0 on all ranks. ``generators`` gives each rank the generator of another
rank. ``saved`` flips a bit of a parameter on rank 1 before a save, and ``restored`` after the restore.
With ``--model batchnorm`` DDP broadcasts buffers, so those of rank 1 at the save differ from those after a restore.
"""

import torch
import torch.distributed as dist
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stagereg


class Dropout(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.2) / 0.8


class FromFirstRank:
    """An optimizer that loads its state on rank 0, which once was the only rank that read the file."""

    def __init__(self, optimizer):
        self.state_dict, self.optimizer = optimizer.state_dict, optimizer

    def load_state_dict(self, state):
        if dist.get_rank() == 0:
            self.optimizer.load_state_dict(state)


def flip_bit(parameter):
    parameter.data.view(torch.int32)[0, 0] ^= 1 << 18


def every_rank(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main():
    faults = "momentum", "buffers", "generators", "saved", "restored"
    args = arguments(*faults, model=["plain", "batchnorm", "separate"], optimizer=["sgd", "zero"])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    dropout = torch.Generator().manual_seed(rank)
    norm = nn.LayerNorm(16) if args.model == "plain" else nn.BatchNorm1d(16)
    module = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), Dropout(dropout), nn.Linear(16, 8))
    model = DistributedDataParallel(module, broadcast_buffers=args.model != "separate")
    if args.optimizer == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = {"model": model, "optimizer": FromFirstRank(optimizer) if args.fault == "momentum" else optimizer}
    state["dropout"] = every_rank(dropout.get_state())
    own_buffers = args.model == "separate" and args.fault != "buffers"
    if own_buffers:
        state["buffers"] = stagereg.per_rank({name: each.clone() for name, each in module.named_buffers()})

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        if start and own_buffers:
            module.load_state_dict(state["buffers"].value, strict=False)
        place = ranks - 1 - rank if args.fault == "generators" else rank  # the hosts have another order
        if start:
            dropout.set_state(state["dropout"][place])
        if start and args.fault == "restored" and rank == 1:
            flip_bit(module[0].weight)
        for step in range(start + 1, args.steps + 1):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            if args.fault == "saved" and step == 6 and rank == 1:
                flip_bit(module[0].weight)
            if checkpointer.should_save(step):
                state["dropout"] = every_rank(dropout.get_state())
                if own_buffers:
                    state["buffers"] = stagereg.per_rank({name: each.clone() for name, each in module.named_buffers()})
                checkpointer.save(step, state)
    write_results(args, model=model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
