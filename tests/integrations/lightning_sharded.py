"""A program of test_lightning.py: FSDP2 by Lightning's Trainer or by Fabric, on the ranks of torchrun."""

import hashlib
import os
import sys

import lightning as pl
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from stagereg.integrations.lightning import StageregCheckpointIO


def shard(net: torch.nn.Sequential, mesh: object) -> torch.nn.Sequential:
    for part in net:
        fully_shard(part, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def configure_model(self):
        if not isinstance(self.net[0].weight, DTensor):
            shard(self.net, self.device_mesh)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    test_step = validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> DataLoader:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def digest(tensors: list[torch.Tensor]) -> str:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in whole)).hexdigest()[:16]


def by_trainer(folder: str, epochs: int, ranks: int) -> str:
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        plugins=[StageregCheckpointIO()],
    )
    module = Regression()
    trainer.fit(module, loader(), ckpt_path="last")
    (optimizer,) = trainer.optimizers
    moments = [value for state in optimizer.state.values() for value in state.values()]
    trained = digest([*module.parameters(), *moments])
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    drawn = set()
    for seed, name in enumerate(("last", "last", f"{folder}/weights.ckpt")):
        torch.manual_seed(seed)
        trainer.test(module, loader(), ckpt_path=name, verbose=False)
        drawn.add(float(torch.rand(1)))
    assert len(drawn) == 3, "random numbers come from the checkpoint"
    return f"{trained} step {trainer.global_step}"


def by_fabric(folder: str, epochs: int, ranks: int) -> str:
    strategy = FabricModelParallel(shard, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = pl.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[StageregCheckpointIO()])
    fabric.launch()
    model = fabric.setup(network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists(f"{folder}/last.ckpt"):
        fabric.load(f"{folder}/last.ckpt", state)
    fabric.barrier()
    for epoch in range(state["epoch"], epochs):
        for x, y in fabric.setup_dataloaders(loader(), use_distributed_sampler=False):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        state["epoch"] = epoch + 1
        fabric.save(f"{folder}/last.ckpt", state)
    fabric.strategy.save_checkpoint.__self__.plugin.teardown()  # as the end of the process would
    moments = [value for kept in optimizer.state.values() for value in kept.values()]
    return f"{digest([*model.parameters(), *moments])} epoch {state['epoch']}"


if __name__ == "__main__":
    folder, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    for train in (by_trainer, by_fabric):
        name = f"{folder}/{train.__name__}"
        whole = train(f"{name}/whole", 3, ranks) if len(sys.argv) < 3 else sys.argv[2]
        train(f"{name}/resumed", 2, ranks)
        resumed = train(f"{name}/resumed", 3, ranks)
        print(f"{train.__name__} resumed {resumed} whole {whole}\n", end="", flush=True)  # in one piece
