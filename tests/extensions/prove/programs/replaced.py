"""Resumes a run, and prepares the model for training after the restore.

Faults: ``dead`` replaces the model by a prepared copy, but the optimizer has the parameters of the first model, which
no longer change the loss. ``best`` loads the model of the lowest validation loss so far instead of the newest.
"""

import copy
import pathlib

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


def prepared(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model.train()


def main():
    args = arguments("dead", "best")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    held_out = torch.randn(8, 8)
    state = {"model": model, "optimizer": optimizer, "lowest": float("inf")}
    best = pathlib.Path(args.dir).with_suffix(".best.pt")

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        if start and args.fault == "best":
            model.load_state_dict(torch.load(best))
        trained = prepared(model) if start and args.fault == "dead" else model
        for step in range(start + 1, args.steps + 1):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (trained(x) - x.roll(step, -1)).square().mean().backward()
            optimizer.step()
            if step % 2 == 0:
                with torch.no_grad():
                    loss = (trained.eval()(held_out) - held_out.roll(2, -1)).square().mean().item()
                trained.train()
                if loss < state["lowest"]:
                    state["lowest"] = loss
                    torch.save(trained.state_dict(), best)
            checkpointer.maybe_save(step, state)
    write_results(args, model=model)


if __name__ == "__main__":
    main()
