"""A plain loop with dropout and a cosine schedule, with several optimizers; ``--compiled yes`` compiles the model."""

import torch
from common import OPTIONS, arguments, write_results

import stagereg

args = arguments(optimizer=["adamw", "momentum", "lbfgs"], compiled=["no", "yes"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
if args.compiled == "yes":
    model = torch.compile(model, backend="eager")
if args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
elif args.optimizer == "momentum":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
else:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, args.steps + 1):
        x, y = torch.randn(4, 8), torch.randint(3, (4,))

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        checkpointer.maybe_save(step, state)
write_results(args, model=getattr(model, "_orig_mod", model))
