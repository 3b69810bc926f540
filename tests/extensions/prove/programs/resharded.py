"""Trains on a global batch of eight samples, which the ranks divide, and resumes on another number of ranks.

Fault ``divided`` saves the number of batches of a rank instead of the number of samples of all ranks. Its batches have
another size on another number of ranks, so samples are repeated or skipped.
"""

import torch
import torch.distributed as dist
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagereg

GLOBAL_BATCH = 8


def main():
    args = arguments("divided")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.randn(128, 8)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "consumed": 0}
    own = GLOBAL_BATCH // ranks
    used = []

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, args.steps + 1):
            first = state["consumed"] + rank * own
            if args.fault == "divided":
                first = state["consumed"] * own + rank * (len(data) // ranks)
            used += range(first, first + own)
            x = data[first : first + own]
            optimizer.zero_grad()
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            state["consumed"] += 1 if args.fault == "divided" else GLOBAL_BATCH
            checkpointer.maybe_save(step, state)
    write_results(args, model=model.module, used=used)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
