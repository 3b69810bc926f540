"""A program of test_lightning_uneven.py: ranks of torchrun with different numbers of batches, trained by Lightning."""

import os
import sys

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stagereg.integrations.lightning import StageregCheckpointIO, UnevenInputs

SAMPLES = [14, 23, 0]  # of each rank, in batches of 4


def data(rank: int) -> TensorDataset:
    x = torch.randn(SAMPLES[rank], 8, generator=torch.Generator().manual_seed(rank))
    return TensorDataset(x, x.sum(1, keepdim=True) + rank)


class Regression(pl.LightningModule):
    def __init__(self, sharded: bool = False, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.sharded, self.fails = sharded, fails

    def configure_model(self):
        if self.sharded and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        if self.fails and self.global_rank == 1 and self.global_step == 3:
            raise ValueError("of rank 1")
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def reference(epochs: int, ranks: int, accumulate: int) -> list[torch.Tensor]:
    """The weights after the same training in one process, on the batches of all ranks in each step."""
    module = Regression()
    (optimizer,), (configured,) = module.configure_optimizers()
    loaders = [list(DataLoader(data(rank), batch_size=4)) for rank in range(ranks) if SAMPLES[rank]]
    steps = max(map(len, loaders))
    for _ in range(epochs):
        for i in range(steps):
            there = [loader[i] for loader in loaders if i < len(loader)]
            x, y = (torch.cat(each) for each in zip(*there, strict=True))
            (torch.nn.functional.mse_loss(module.net(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == steps:
                optimizer.step()
                optimizer.zero_grad()
                configured["scheduler"].step()
    return [each.detach() for each in module.parameters()]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data(int(os.environ["RANK"])))


def train(case: str, folder: str, epochs: int) -> pl.LightningModule:
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sharded = case == "sharded"
    module = Regression(sharded, case == "failing")
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1) if sharded else "ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        accumulate_grad_batches=4 if case == "accumulated" else 1,
        callbacks=[UnevenInputs(), ModelCheckpoint(folder, save_last=True)],
        plugins=[StageregCheckpointIO()],
    )
    source = Stream() if case == "stream" else data(rank)
    loader = DataLoader(source, batch_size=4)
    trainer.fit(module, loader, DataLoader(data(1), batch_size=4), ckpt_path="last")
    return module


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for case in cases:
        if case == "resumed":
            train(case, f"{folder}/{case}", 1)
        try:
            module = train(case, f"{folder}/{case}", 3)
        except Exception as error:
            text = str(error).replace("\n", " ")
            print(f"{case} rank {rank} {type(error).__name__} {text}\n", end="", flush=True)  # in one piece
            continue
        expected = reference(3, ranks, 4 if case == "accumulated" else 1)
        found = [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in module.parameters()]
        off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        every = [torch.zeros_like(found[0]) for _ in range(ranks)]
        torch.distributed.all_gather(every, found[0])
        same = all(torch.equal(every[0], each) for each in every)
        if rank == 0:
            print(case, "off by", off, "same" if same else "drifted", flush=True)
