"""Trains a variational autoencoder whose loss has annealed weights, and longer sequences at later stages.

Faults: ``weight`` anneals the weight of the KL divergence in a variable that is not in the state. ``temperature`` does
the same in an attribute of the trainer. ``stage`` loses the stage of the curriculum, so the sequences are short again.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(z), -0.5 * (1 + spread - mean.square() - spread.exp()).mean()


class Trainer:
    def __init__(self, args):
        torch.manual_seed(0)
        self.args, self.model = args, Autoencoder()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.temperature, self.stage = 2.0, 0

    def state(self, weight):
        plain = {"weight": weight, "temperature": self.temperature, "stage": self.stage}
        plain.pop(self.args.fault, None)
        return {"model": self.model, "optimizer": self.optimizer, **plain}

    def train(self):
        weight = 0.0
        with stagereg.Checkpointer(self.args.dir, **OPTIONS) as checkpointer:
            state = self.state(weight)
            start = checkpointer.restore(state) or 0
            weight = state.get("weight", weight)
            self.temperature = state.get("temperature", self.temperature)
            self.stage = state.get("stage", self.stage)
            for step in range(start + 1, self.args.steps + 1):
                x = torch.randn(4, 2 + 2 * self.stage, 6)
                self.optimizer.zero_grad()
                out, divergence = self.model(x)
                loss = ((out - x) / self.temperature).square().mean() + weight * divergence
                loss.backward()
                self.optimizer.step()
                weight = min(1.0, weight + 0.05)
                self.temperature = max(0.5, self.temperature * 0.95)
                if step % 3 == 0:
                    self.stage += 1
                checkpointer.maybe_save(step, self.state(weight))


if __name__ == "__main__":
    args = arguments("weight", "temperature", "stage")
    trainer = Trainer(args)
    trainer.train()
    write_results(args, model=trainer.model)
