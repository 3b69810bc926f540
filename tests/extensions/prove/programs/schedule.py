"""Trains with a schedule and two param groups.

Faults: ``twice`` steps the scheduler again after the restore. ``decay`` sets the weight decay of the config in both
groups after the restore. ``lr`` sets the learning rate of the config, although the run has lowered it. ``warmup``
computes the learning rate from a counter that is not in the state. ``repeat`` and ``skip`` continue at a step that is
off by one.
"""

import math

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg

LR, WEIGHT_DECAY, WARMUP = 0.02, 0.1, 10


def main():
    args = arguments("twice", "decay", "lr", "warmup", "repeat", "skip", schedule=["cosine", "drop", "warmup"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    state = {"model": model, "optimizer": optimizer}
    scheduler = None
    if args.schedule == "cosine":
        factor = lambda step: min(1, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / 20))  # noqa: E731
        state["scheduler"] = scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        resumed = start > 0
        if resumed and args.fault == "twice":
            scheduler.step()
        if resumed and args.fault == "decay":
            for group in optimizer.param_groups:
                group["weight_decay"] = WEIGHT_DECAY
        if resumed and args.fault == "lr":
            for group in optimizer.param_groups:
                group["lr"] = LR
        warmed = 0 if args.fault == "warmup" else start
        first = start + 1
        if resumed and args.fault == "repeat":
            first = start
        if resumed and args.fault == "skip":
            first = start + 2
        for step in range(first, args.steps + 1):
            if args.schedule == "warmup":
                warmed += 1
                for group in optimizer.param_groups:
                    group["lr"] = LR * min(1.0, warmed / WARMUP)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 8, generator=generator)
            y = torch.randint(3, (4,), generator=generator)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if args.schedule == "drop" and step == 3:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1
            checkpointer.maybe_save(step, state)
    write_results(args, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
