"""Trains a value function on transitions from a replay buffer, with normalized observations.

Faults: ``buffer`` begins with an empty replay buffer. ``normalizer`` loses the mean and spread of the observations.
"""

import random

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


class Normalizer:
    def __init__(self):
        self.count, self.mean, self.squares = 0, torch.zeros(6), torch.zeros(6)

    def __call__(self, x):
        self.count += 1
        delta = x - self.mean
        self.mean = self.mean + delta / self.count
        self.squares = self.squares + delta * (x - self.mean)
        return (x - self.mean) / (self.squares / self.count + 1).sqrt()

    def state_dict(self):
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state):
        self.count, self.mean, self.squares = state["count"], state["mean"].clone(), state["squares"].clone()


class Agent:
    def __init__(self, args):
        torch.manual_seed(0)
        random.seed(0)
        self.args, self.normalizer, self.replay = args, Normalizer(), []
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def state(self):
        state = {"model": self.model, "optimizer": self.optimizer}
        if self.args.fault != "normalizer":
            state["normalizer"] = self.normalizer
        if self.args.fault != "buffer":
            state["replay"] = [each.clone() for each in self.replay]
        return state

    def train(self):
        with stagereg.Checkpointer(self.args.dir, **OPTIONS) as checkpointer:
            state = self.state()
            start = checkpointer.restore(state) or 0
            self.replay = list(state.get("replay", []))
            for step in range(start + 1, self.args.steps + 1):
                self.replay += [self.normalizer(torch.randn(6) * 2 + 1) for _ in range(3)]
                x = torch.stack(random.sample(self.replay, 3))
                self.optimizer.zero_grad()
                (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                self.optimizer.step()
                checkpointer.maybe_save(step, self.state())


if __name__ == "__main__":
    args = arguments("buffer", "normalizer")
    agent = Agent(args)
    agent.train()
    write_results(args, model=agent.model)
