"""Train with Lightning on two ranks, with checkpoints of stagereg. Stop or kill the run, and start it again.

torchrun --nproc-per-node 2 lightning_train.py --dir runs/lightning --epochs 4
"""

import argparse
import hashlib
import logging
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from stagereg.integrations.lightning import StageregCheckpointIO


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def loader(seed: int) -> DataLoader[Any]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def digest(module: pl.LightningModule, optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    text = hashlib.sha256(str(schedule.state_dict()).encode())
    for tensor in [*module.state_dict().values(), *moments]:
        text.update(tensor.detach().cpu().numpy().tobytes())
    return text.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0)
    module = Regression()
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(options.dir, monitor="val_loss", save_top_k=2, save_last=True)],
        plugins=[StageregCheckpointIO()],  # the only added line
    )
    trainer.fit(module, loader(1), loader(2), ckpt_path="last")
    if trainer.is_global_zero:
        print("weights", digest(module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler), flush=True)
    trainer.test(module, loader(3), ckpt_path="best", verbose=False)


if __name__ == "__main__":
    main()
