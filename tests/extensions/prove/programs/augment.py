"""Augments its data with random numbers of a generator, which is in the state.

Faults: ``numpy``, ``python`` and ``torch`` do not save that generator. ``reseed`` seeds the global generators after the
restore. With ``--own global`` the augmentation draws from the global generators of Python, NumPy and torch.
"""

import random

import numpy as np
import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noise:
    """Adds noise, with NumPy's generator in an attribute."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, x):
        return x + torch.from_numpy(self.rng.normal(0, 0.1, x.shape).astype(np.float32))


def main():
    args = arguments("numpy", "python", "torch", "reseed", own=["own", "global"])
    seed_everything(0)
    data, labels = torch.randn(12, 4, 8), torch.randint(3, (12, 4))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    if args.own == "own":
        noise, flips, cuts = Noise(1), random.Random(2), torch.Generator().manual_seed(3)
        generators = {"numpy": noise.rng, "python": flips, "torch": cuts}
        state |= {name: each for name, each in generators.items() if name != args.fault}

        def augment(x):
            x = noise(x)
            if flips.random() < 0.5:
                x = x.flip(-1)
            return x * (torch.rand(x.shape, generator=cuts) > 0.1)
    else:

        def augment(x):
            x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape).astype(np.float32))
            if random.random() < 0.5:
                x = x.flip(-1)
            return x * (torch.rand(x.shape) > 0.1)

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        if args.fault == "reseed":
            seed_everything(0)
        for step in range(start + 1, args.steps + 1):
            optimizer.zero_grad()
            x, y = augment(data[step % 12]), labels[step % 12]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpointer.maybe_save(step, state)
    write_results(args, model=model)


if __name__ == "__main__":
    main()
