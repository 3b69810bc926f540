"""Trains a pretrained body and a head with a queue of earlier outputs; the body is frozen for the first three steps.

Faults: ``eval`` validates the restored model and leaves it in evaluation mode. ``frozen`` does not unfreeze the body in
a resumed run. ``plateau`` does not save the scheduler, whose count of bad steps is lost. ``queue`` keeps the queue in a
buffer that is not persistent.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


class Contrast(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))
        self.register_buffer("queue", torch.zeros(8, 4), persistent=persistent)

    def forward(self, x):
        out = self.head(self.body(x))
        loss = (out - x[:, :4]).square().mean() + (out @ self.queue.T).square().mean()
        if self.training:
            self.queue = torch.cat([self.queue[len(out) :], out.detach()])
        return loss


def main():
    args = arguments("eval", "frozen", "plateau", "queue")
    torch.manual_seed(0)
    model = Contrast(persistent=args.fault != "queue")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    held_out = torch.randn(4, 8)
    state = {"model": model, "optimizer": optimizer}
    if args.fault != "plateau":
        state["scheduler"] = scheduler

    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore(state) or 0
        if start and args.fault == "eval":
            with torch.no_grad():
                print(f"resumed at step {start}, loss {model.eval()(held_out).item():.4f}")
        if args.fault == "frozen" or start < 3:
            model.body.requires_grad_(False)
        for step in range(start + 1, args.steps + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8))
            loss.backward()
            optimizer.step()
            scheduler.step(loss.detach())
            if step == 3:
                model.body.requires_grad_(True)
            checkpointer.maybe_save(step, state)
    write_results(args, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
