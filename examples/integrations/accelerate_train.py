"""A training program for accelerate with uneven inputs, whose checkpoints a Checkpointer writes.

    torchrun --nproc-per-node 2 examples/integrations/accelerate_train.py --dir runs/accelerate --epochs 4

Stop it at any time, with Ctrl-C or `kill -9`, and run it again: it resumes, and prints the same digest at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import stagereg.integrations.accelerate


class Progress:
    """The progress of the run. It is registered with accelerate, so checkpoints include it."""

    def __init__(self) -> None:
        self.epoch, self.batch = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


def main(dir: str, epochs: int, every: int) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    stagereg.integrations.accelerate.attach(accelerator, join=True)  # the only added line

    set_seed(0)
    x = torch.randn(132, 16)  # 17 batches of 8: nine on rank 0, eight on rank 1
    y = x.sum(1, keepdim=True).sin()
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.995)
    # Starting a loader draws a random number. With its own generator, a resumed run does not draw an extra number.
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, scheduler, batches = accelerator.prepare(module, adamw, schedule, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if os.path.isdir(dir):
        accelerator.load_state(dir)
    accelerator.print(f"starting at epoch {progress.epoch}, batch {progress.batch}")
    for epoch in range(progress.epoch, epochs):
        left: Any = skip_first_batches(batches, progress.batch) if progress.batch else batches
        with accelerator.join_uneven_inputs([model]):
            for inputs, targets in left:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.batch += 1
                if progress.batch % every == 0:
                    accelerator.save_state(dir)
        batches.iteration = epoch + 1
        progress.epoch, progress.batch = epoch + 1, 0
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print(f"rank {accelerator.process_index}: digest {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/accelerate")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=3)
    main(**vars(parser.parse_args()))
