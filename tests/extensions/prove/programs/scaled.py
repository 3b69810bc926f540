"""Trains with mixed precision and a ``GradScaler``, which is in the state.

Fault ``scale`` does not save the scaler, so a resumed run begins with the initial scale.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg

args = arguments("scale")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
state = {"model": model, "optimizer": optimizer}
if not args.fault:
    state["scaler"] = scaler

with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, args.steps + 1):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        checkpointer.maybe_save(step, state)
write_results(args, model=model, scaler=scaler)
