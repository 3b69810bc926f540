"""Trains on shuffled epochs with a sampler of its own, which is in the state.

Faults: ``restart`` saves the epoch, but not the position in the epoch. With ``prefetch``, workers of the loader fetch
batches ahead, so that the sampler's position is ahead of the batches that were trained on. With ``seed`` the loader has
no generator of its own, so each pass over it draws a number from the global generator, and a resume begins a new pass.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagereg


class ShuffledSampler:
    def __init__(self, size, seed=0):
        self.size, self.seed, self.epoch, self.position = size, seed, 0, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        while self.position < self.size:
            self.position += 1
            yield order[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def main():
    args = arguments("restart", "prefetch", "seed")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = ShuffledSampler(len(data))
    workers = 2 if args.fault == "prefetch" else 0
    generator = None if args.fault == "seed" else torch.Generator()
    loader = DataLoader(data, 4, sampler=sampler, num_workers=workers, generator=generator)
    state = {"model": model, "optimizer": optimizer}
    if args.fault == "restart":
        state["epoch"] = 0
    else:
        state["sampler"] = sampler

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        step = checkpointer.restore(state) or 0
        if args.fault == "restart":
            sampler.epoch = state["epoch"]
        while step < args.steps:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                step += 1
                if args.fault == "restart":
                    state["epoch"] = sampler.epoch
                checkpointer.maybe_save(step, state)
                if step == args.steps:
                    break
    write_results(args, model=model)


if __name__ == "__main__":
    main()
