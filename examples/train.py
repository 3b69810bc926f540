"""Train a byte-level language model on the source code of Python's standard library.

The program downloads nothing: it trains on the library of the running Python. Without a GPU, two local ranks train on
the CPU in about a minute. To train your own model, copy the program and replace the model and the data.

    python train.py stager=pinned_cached join.throw=true
    python train.py data=uneven parallel=fsdp2

The run's directory then has the logged losses, the cost of each checkpoint, and the number of steps of each rank.
"""

import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import stagereg
from stagereg.data import ResumableSampler

LOG_EVERY = 5
"""Steps between two losses in the run's record. Reading a loss waits for the device, so not every step does it."""


class Model(nn.Module):
    """A causal transformer over bytes. Input: indices [batch, time]. Output: logits [batch * time, 256]."""

    mask: Tensor

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        hidden = self.token(x) + self.place.weight[:time]
        return self.head(self.body(hidden, mask=self.mask[:time, :time], is_causal=True).flatten(0, 1))


def samples(files: list[Path], context: int) -> Tensor:
    """Cut the text of ``files`` into samples of ``context + 1`` bytes, because each byte predicts the next byte."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def load(cfg: DictConfig, seed: int, rank: int, world: int) -> tuple[DataLoader[Any], ResumableSampler, Tensor]:
    """Return the loader of training batches, the sampler that deals samples to ranks, and samples for evaluation."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.glob("*.py") if file.stat().st_size > 2_000)
    held_out, files = files[::10][:8], [file for i, file in enumerate(files) if i % 10][: cfg.files]
    apart = cfg.shard == "files"  # each rank has its own files, so the ranks run out of data at different steps
    text = TensorDataset(samples(files[rank::world] if apart else files, cfg.context))
    dealt_to, seed = ((1, 0), seed + rank) if apart else ((world, rank), seed)
    sampler = ResumableSampler(text, *dealt_to, seed=seed, drop_last=True)
    loader = DataLoader(text, cfg.batch, sampler=sampler, drop_last=True)
    return loader, sampler, samples(held_out, cfg.context)


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    """Return the loss in nats, summed over the predicted bytes, and the number of predicted bytes."""
    batch = batch.long()
    targets = batch[:, 1:].flatten()
    return cross_entropy(model(batch[:, :-1]), targets, reduction="sum"), len(targets)


def distributed(model: Model, cfg: DictConfig) -> tuple[nn.Module, Any]:
    """Return the model, wrapped for training on all ranks, and its optimizer."""
    if cfg.parallel == "fsdp2":
        for part in (*model.body.layers, model):
            fully_shard(part)
    together = model if cfg.parallel == "fsdp2" else DistributedDataParallel(model)
    if cfg.parallel == "zero":
        return together, ZeroRedundancyOptimizer(together.parameters(), torch.optim.AdamW, lr=cfg.train.lr)
    return together, torch.optim.AdamW(together.parameters(), lr=cfg.train.lr)


@stagereg.main(config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if cfg.parallel not in ("ddp", "zero", "fsdp2") or cfg.data.shard not in ("samples", "files"):
        raise stagereg.StageregError("choose parallel=ddp, zero or fsdp2, and data.shard=samples or files")
    if cfg.train.steps < 0:
        raise stagereg.StageregError(f"train.steps must be at least 0, got {cfg.train.steps}")
    torch.manual_seed(cfg.seed)
    loader, sampler, held_out = load(cfg.data, cfg.seed, rank, world)
    held_out = held_out[: 8 * cfg.data.batch][rank::world].to(device)

    model, optimizer = distributed(Model(**cfg.model, context=cfg.data.context).to(device), cfg)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.train.steps)
    # The checkpointer adds the step and the random number generators.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    losses: list[Tensor] = []  # one per batch of this rank

    def evaluate() -> float:
        with torch.no_grad():
            loss, count = loss_of(getattr(model, "module", model), held_out)
        total = torch.stack([loss, torch.tensor(float(count), device=device)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def report(step: int) -> None:
        note = ""
        if step % cfg.train.eval_every == 0:
            found = evaluate()
            stagereg.log(step, held_out=found)
            note = f"  held-out {found:.3f}"
        if rank == 0 and (note or sys.stdout.isatty()):
            bar, loss = "=" * (30 * step // cfg.train.steps), losses[-1].item() if losses else math.nan
            print(
                f"\r[{bar:30}] step {step}/{cfg.train.steps}  loss {loss:.3f}{note}", end="\n" * bool(note), flush=True
            )

    join = stagereg.instantiate(cfg.join, model=model, optimizer=optimizer)
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        step = start = checkpointer.restore(state) or 0
        began = time.perf_counter()
        mine = sampler.batches(loader, cfg.data.epochs, limit=cfg.train.steps - start)

        try:
            with join:
                # All ranks run this body while any rank has data. Ranks without data get empty batches.
                for (batch,) in join.iterate(mine):
                    loss, count = loss_of(model, batch.to(device))
                    join.mean(loss, count).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if count:
                        losses.append(loss.detach() / count)
                    step += 1
                    if count and step % LOG_EVERY == 0:
                        stagereg.log(step, loss=losses[-1])
                    report(step)  # before the save, because a checkpoint includes the metrics logged so far
                    checkpointer.maybe_save(step, state)
        except stagereg.UnevenInputsError:  # with join.throw, raised on all ranks at the same step
            if step not in (start, checkpointer.saved):
                checkpointer.save(step, state)
            raise
        seconds = time.perf_counter() - began
    final = evaluate()
    summarize(rank, step - start, losses, cfg.data.batch, checkpointer, seconds, final)
    return final


def summarize(
    rank: int, steps: int, losses: list[Tensor], batch: int, checkpointer: Any, seconds: float, final: float
) -> None:
    """Print a summary of the run on rank 0. Collective."""
    stats = checkpointer.stats
    mine = ([loss.item() for loss in losses], stats.bytes_staged)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if rank != 0:
        return
    firsts, lasts = ([own[at] for own, _ in ranks if own] for at in (0, -1))
    latest = checkpointer.latest
    newest = os.path.relpath(latest) if isinstance(latest, Path) else latest  # a URL
    rows = {
        "steps": f"{steps} in {seconds:.1f} s",
        "samples": f"{batch * sum(len(own) for own, _ in ranks):,}",
        "loss, first and last": f"{mean(firsts):.3f}, {mean(lasts):.3f}" if firsts else "no steps were left to train",
        "loss on held-out files": f"{final:.3f} nats/byte",
        "checkpoints": f"{stats.saves}, newest {newest or '-'}",
        "staged": f"{sum(nbytes for _, nbytes in ranks) / 2**30:.3f} GiB",
        "stall per checkpoint": f"{1e3 * median(stats.stall_seconds):.1f} ms" if stats.stall_seconds else "-",
        "write per checkpoint": f"{1e3 * median(stats.write_seconds):.1f} ms" if stats.write_seconds else "-",
        "shadowed steps per rank": ", ".join(str(steps - len(own)) for own, _ in ranks),
    }
    print("\n" + "\n".join(f"  {name:24} {value}" for name, value in rows.items()), flush=True)


if __name__ == "__main__":
    train()
