"""A program of test_lightning_tier.py: :mod:`lightning_resume`'s model with a tier, stopped and resumed, by ``fit``."""

import hashlib
import json
import os
import random
import signal
import sys

import lightning as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_resume import Noisy, Stop
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import stagereg
from stagereg.integrations.lightning import StageregCheckpointIO


def fit(folder: str, kind: str, seed: int, stop: int | None = None, kill: int | None = None, **more) -> str:
    """Train 12 steps, 4 an epoch; return from where the run began, and what it has come to.

    It is stopped in the step after ``stop``, or dies by a signal in that after ``kill``.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    sharded = kind == "sharded"
    tier = stagereg.build("tier", "disk", dir=f"{folder}/near", every=1, copies=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks, 1) if sharded else "ddp" if ranks > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(f"{folder}/ck", save_last=True, every_n_epochs=2)],
        plugins=[StageregCheckpointIO(tier=tier)],
        **{"max_epochs": 3, **more},
    )
    batches = 4 * trainer.accumulate_grad_batches
    data = TensorDataset(torch.randn(8 * batches * ranks, 8, generator=torch.Generator().manual_seed(1)))
    loaders = [DataLoader(data, batch_size=8, shuffle=shuffle) for shuffle in (True, False)]
    module = Drawing(None if stop is None else stop + 1)
    began = []
    trainer.callbacks.append(At(began, kill))
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed + rank)
    try:
        trainer.fit(module, *loaders, ckpt_path="last")
    except Stop:
        return f"from {began[0]}"
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in module.parameters()]
    text = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in whole)).hexdigest()[:16]
    drawn = f"{torch.rand(1).item()} {random.random()} {np.random.rand()}"
    return f"from {began[0]} to {trainer.global_step} epoch {trainer.current_epoch} {text} {drawn}"


class Drawing(Noisy):
    """Draws after an epoch as well."""

    def on_train_epoch_end(self) -> None:
        torch.rand(1)


class At(pl.Callback):
    """Notes at which step training begins, and ends the process after a step."""

    def __init__(self, began: list[int], kill: int | None) -> None:
        self.began, self.kill = began, kill

    def on_train_start(self, trainer, pl_module):
        self.began.append(trainer.global_step)

    def on_train_batch_end(self, trainer, *_):
        if self.kill is not None and trainer.global_step > self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    root, kind, options, *stops = sys.argv[1:]
    more = json.loads(options)
    rank, found = os.environ.get("RANK", "0"), {"whole": fit(f"{root}/whole", kind, 7, **more)}
    for stop in map(int, stops):
        fit(f"{root}/{stop}", kind, 7, stop=stop, **more)
        found[stop] = fit(f"{root}/{stop}", kind, 70, **more)
    print("".join(f"rank {rank} {name}: {each}\n" for name, each in found.items()), end="", flush=True)
