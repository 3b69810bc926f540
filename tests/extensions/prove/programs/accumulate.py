"""Accumulates the gradients of three batches for each optimizer step, and saves between two of these batches too.

Faults: ``counter`` counts the batches from 0 after the restore. ``gradients`` does not save the accumulated gradients.
``--save steps`` counts optimizer steps instead of batches, so that no save has accumulated gradients.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg

ACCUMULATED = 3


def main():
    args = arguments("counter", "gradients", save=["batches", "steps"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def backward():
        x = torch.randn(4, 8)
        (model(x) - x).square().mean().div(ACCUMULATED).backward()

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        state = {"model": model, "optimizer": optimizer}
        if args.save == "steps":
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, args.steps + 1):
                for _ in range(ACCUMULATED):
                    backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.maybe_save(step, state)
        else:
            gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            if args.fault != "gradients":
                state["gradients"] = gradients
            start = checkpointer.restore(state) or 0
            if args.fault != "gradients":
                for name, parameter in model.named_parameters():
                    parameter.grad = state["gradients"][name].clone()
            count = 0 if args.fault == "counter" else start
            for step in range(start + 1, args.steps + 1):
                backward()
                count += 1
                if count % ACCUMULATED == 0:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                if args.fault != "gradients":
                    state["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
                checkpointer.maybe_save(step, state)
    write_results(args, model=model)


if __name__ == "__main__":
    main()
