"""Trains a model and watches the run: validation, running means, times, and saves that the program decides about.

``--watch validation`` evaluates the model between saves. ``--watch times`` prints the mean of the losses since the
start of the program, and has times in the state. ``--watch saves`` calls ``should_save`` and ``save`` instead of
``maybe_save``. ``--watch kill`` kills the first run of a directory at step 10.
"""

import os
import pathlib
import signal
import time

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


@torch.no_grad()
def validate(model, batches):
    model.eval()
    loss = sum((model(x) - x).square().mean().item() for x in batches) / len(batches)
    model.train()
    return loss


def main():
    args = arguments(watch=["validation", "times", "saves", "kill"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held_out = torch.randn(3, 4, 8)
    state = {"model": model, "optimizer": optimizer}
    began, losses = time.time(), []
    if args.watch == "times":
        state |= {"saved_at": began, "seconds": 0.0}

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        earlier = state.get("seconds", 0.0)
        for step in range(start + 1, args.steps + 1):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if args.watch == "validation" and step % 2 == 0:
                print(f"step {step}: held-out loss {validate(model, held_out):.4f}")
            if args.watch == "times":
                state |= {"saved_at": time.time(), "seconds": earlier + time.time() - began}
                print(f"step {step}: mean loss {sum(losses) / len(losses):.4f}, {state['seconds']:.1f} s")
            if args.watch == "kill" and step == 10 and start == 0:
                while not pathlib.Path(args.dir, "step-00000008").is_dir():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if args.watch == "saves":
                if checkpointer.should_save(step):
                    checkpointer.save(step, state)
            else:
                checkpointer.maybe_save(step, state)
    write_results(args, model=model)


if __name__ == "__main__":
    main()
