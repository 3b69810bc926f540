"""A trainer class that saves its optimizer by the positions of parameters, for a model of twelve equal layers.

Fault ``swapped``: a resumed run passes the parameters to the optimizer in the alphabetical order of their names, in
which layer 10 precedes layer 2. So layers get the momentum of other layers. Fault ``latest`` is the same in a program
that asks the checkpointer, not the directory, whether it resumes.
"""

from pathlib import Path

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


class Trainer:
    def __init__(self, args):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(12)))
        self.checkpointer = stagereg.Checkpointer(args.dir, **OPTIONS)
        named = list(self.model.named_parameters())
        exists = Path(args.dir, "latest").exists()
        resumes = {"swapped": exists, "latest": self.checkpointer.latest is not None}
        if resumes.get(args.fault):
            named.sort()
        self.optimizer = torch.optim.AdamW([parameter for _, parameter in named], lr=0.01)
        self.start = self.checkpointer.restore({"model": self.model, "trainer": self}) or 0

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, steps):
        with self.checkpointer:
            for step in range(self.start + 1, steps + 1):
                self.optimizer.zero_grad()
                x = torch.randn(4, 6)
                (self.model(x) - x).square().mean().backward()
                self.optimizer.step()
                self.checkpointer.maybe_save(step, {"model": self.model, "trainer": self})


if __name__ == "__main__":
    args = arguments("swapped", "latest")
    trainer = Trainer(args)
    trainer.train(args.steps)
    write_results(args, model=trainer.model)
