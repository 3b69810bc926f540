"""Trains a generator against a discriminator, which is called twice per step; each has its own optimizer."""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import stagereg


def main():
    args = arguments()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        "discriminator": torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.9)),
    }
    nets = {"generator": generator, "discriminator": discriminator}
    state = {"nets": nets, "optimizers": optimizers}
    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, args.steps + 1):
            real, fake = torch.randn(8, 2) + 3, generator(torch.randn(8, 4))
            optimizers["discriminator"].zero_grad()
            loss = cross_entropy(discriminator(real), torch.ones(8, 1))
            loss = loss + cross_entropy(discriminator(fake.detach()), torch.zeros(8, 1))
            loss.backward()
            optimizers["discriminator"].step()
            optimizers["generator"].zero_grad()
            cross_entropy(discriminator(fake), torch.ones(8, 1)).backward()
            optimizers["generator"].step()
            checkpointer.maybe_save(step, state)
    write_results(args, **nets)


if __name__ == "__main__":
    main()
