"""Trains on batches that two workers of a loader fetch ahead, with a ``ResumableSampler``."""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagereg
from stagereg.data import ResumableSampler


def main():
    args = arguments()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 8), torch.randint(3, (20,)))
    sampler = ResumableSampler(data, seed=1)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=2, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        step = checkpointer.restore(state) or 0
        for x, y in sampler.batches(loader, epochs=9, limit=args.steps - step):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            checkpointer.maybe_save(step, state)
    write_results(args, model=model)


if __name__ == "__main__":
    main()
