"""Keeps an exponential moving average of its model, which is in the state.

Faults: ``unrestored`` saves the average, but the state of ``restore`` lacks it. ``unsaved`` neither saves nor restores
it. With ``--kind copy`` the average is a copy of the model instead of torch's ``AveragedModel``.
"""

import copy

import torch
from common import OPTIONS, arguments, write_results
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stagereg


@torch.no_grad()
def update(average, model, decay=0.9):
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


def main():
    args = arguments("unrestored", "unsaved", kind=["averaged", "copy"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if args.kind == "averaged":
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    else:
        ema = copy.deepcopy(model).requires_grad_(False)
    restored = {"model": model, "optimizer": optimizer}
    if not args.fault:
        restored["ema"] = ema
    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(restored) or 0
        state = {"model": model, "optimizer": optimizer}
        if args.fault != "unsaved":
            state["ema"] = ema
        for step in range(start + 1, args.steps + 1):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            if args.kind == "averaged":
                ema.update_parameters(model)
            else:
                update(ema, model)
            checkpointer.maybe_save(step, state)
    write_results(args, model=model, ema=ema)


if __name__ == "__main__":
    main()
