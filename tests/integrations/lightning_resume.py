"""A program of test_lightning.py: a model with dropout on the ranks of torchrun, stopped and resumed, by ``fit``."""

import hashlib
import os
import random
import sys
from pathlib import Path

import lightning as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from stagereg.integrations.lightning import StageregCheckpointIO

EPOCHS, STOPS = 3, {"at the end": 8, "in mid-epoch": 6}
"""Of 4 steps an epoch, on two ranks."""


class Stop(Exception):
    """What ends a run in its middle."""


class Noisy(pl.LightningModule):
    """Draws from all three generators, in hooks, in training and in validation."""

    def __init__(self, stop: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.stop = stop

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(1)

    def training_step(self, batch, batch_idx):
        noise = 0.1 * (random.random() + float(np.random.rand()))
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True) + noise).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).square().mean() + torch.rand(1).item(), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == self.stop:
            raise Stop

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder: str, kind: str, seed: int, epochs: int = EPOCHS, stop: int | None = None) -> str:
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    sharded = kind == "sharded"
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1) if sharded else "ddp" if ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder, save_last=True, every_n_train_steps=5 if stop else None),
        ],
        plugins=[StageregCheckpointIO()],
    )
    data = TensorDataset(torch.randn(8 * 4 * ranks, 8, generator=torch.Generator().manual_seed(1)))
    loaders = [DataLoader(data, batch_size=8, shuffle=shuffle) for shuffle in (True, False)]
    module = Noisy(stop)
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed + rank)
    try:
        trainer.fit(module, *loaders, ckpt_path="last")
    except Stop:
        return ""
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in module.parameters()]
    text = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in whole)).hexdigest()[:16]
    return f"step {trainer.global_step} {text} {torch.rand(1).item()} {random.random()} {np.random.rand()}"


if __name__ == "__main__":
    root, kind = sys.argv[1:]
    rank, found = os.environ.get("RANK", "0"), {"whole": fit(f"{root}/whole", kind, 7)}
    fit(f"{root}/end", kind, 7, epochs=2)
    found["end"] = fit(f"{root}/end", kind, 70)
    fit(f"{root}/middle", kind, 7, stop=6)
    assert Path(f"{root}/middle/last.ckpt").exists()
    found["middle"] = fit(f"{root}/middle", kind, 70)
    print("".join(f"rank {rank} {name}: {each}\n" for name, each in found.items()), end="", flush=True)
