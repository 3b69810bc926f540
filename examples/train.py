"""Train a byte-level language model on the source code of Python's standard library.

Everything this needs is on every machine: the text is the library of the running Python, and without a GPU two local
ranks train on the CPU in about a minute. Copy it, and put your model and your data where these are.

    python train.py stager=pinned_cached join.throw=true
    python train.py data=uneven parallel=zero
"""

import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import stagereg


class Model(nn.Module):
    """A causal transformer over bytes: indices of shape [batch, time] in, logits of shape [batch, time, 256] out."""

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
        return self.head(self.body(hidden, mask=self.mask[:time, :time], is_causal=True))


class Progress:
    """What has happened so far; saved in every checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[Tensor] = []  # one a batch of this rank; not saved

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def samples(files: list[Path], context: int) -> Tensor:
    """Cut the text of ``files`` into samples of one byte more than the context, since each byte predicts the next."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)


def load(cfg: DictConfig, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples for training, and samples for evaluation, the same on all ranks."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.glob("*.py") if file.stat().st_size > 2_000)
    held_out, files = files[::10][:8], [file for i, file in enumerate(files) if i % 10][: cfg.files]
    if cfg.shard == "files":
        return samples(files[rank::world], cfg.context), samples(held_out, cfg.context)
    every = samples(files, cfg.context)
    return every[: len(every) // world * world][rank::world], samples(held_out, cfg.context)


def batches(data: Tensor, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield up to ``steps`` shuffled batches of full size, the same ones whenever the seed is the same."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    for step in range(min(steps, len(data) // size)):
        yield data[order[step * size : (step + 1) * size]].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def schedule(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate's factor: a linear warm-up, then half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


@stagereg.main(config_path="conf", config_name="train")
def train(cfg: DictConfig) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(cfg.seed)
    mine, held_out = load(cfg.data, rank, world)
    held_out = held_out[: 8 * cfg.data.batch][rank::world].long().to(device)

    model = DistributedDataParallel(Model(**cfg.model, context=cfg.data.context).to(device))
    parameters = list(model.parameters())
    if cfg.parallel == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=cfg.train.lr)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=cfg.train.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(schedule, warmup=cfg.train.warmup, steps=cfg.train.steps)
    )
    progress = Progress()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}

    def evaluate() -> float:
        with torch.no_grad():
            count = torch.tensor(float(len(held_out)), device=device)
            total = torch.stack([loss_of(model.module, held_out) * count, count])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def advance() -> None:
        """All that follows backward(). Ranks without data run it too, so that all stay equal and save together."""
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        checkpointer.maybe_save(progress.step, state)
        note = f"  held-out {evaluate():.3f}" if progress.step % cfg.train.eval_every == 0 else ""
        show(rank, progress, cfg.train.steps, note)

    join = stagereg.instantiate(cfg.join, [model, advance])
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        start = checkpointer.restore(state) or 0
        began = time.perf_counter()
        try:
            with join:
                for batch in islice(batches(mine, cfg.data.batch, cfg.train.steps, cfg.seed + rank), start, None):
                    loss = loss_of(model, batch.to(device))
                    loss.backward()
                    progress.losses.append(loss.detach())
                    advance()
        except stagereg.UnevenInputsError:  # told to throw: all ranks are here, at the same step
            checkpointer.save(progress.step, state)
            raise
        if progress.step % checkpointer.every:
            checkpointer.save(progress.step, state)
        seconds = time.perf_counter() - began
    final = evaluate()
    summarize(rank, progress.step - start, progress.losses, cfg.data.batch, checkpointer, seconds, final)
    return final


def show(rank: int, progress: Progress, steps: int, note: str) -> None:
    """Draw the progress bar on rank 0; without a terminal, only the lines that have something to say."""
    if rank != 0 or not (note or sys.stdout.isatty()):
        return
    done = min(1.0, progress.step / steps)
    loss = f"{progress.losses[-1].item():.3f}" if progress.losses else "-"
    line = f"[{'=' * int(30 * done):30}] step {progress.step}/{steps}  loss {loss}{note}"
    print(f"\r{line}", end="\n" if note else "", flush=True)


def summarize(
    rank: int, steps: int, losses: list[Tensor], batch: int, checkpointer: Any, seconds: float, final: float
) -> None:
    """Print the table of the run on rank 0. Called on all ranks."""
    stats = checkpointer.stats
    mine = ([loss.item() for loss in losses], stats.bytes_staged)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if rank != 0:
        return
    firsts, lasts = ([own[at] for own, _ in ranks if own] for at in (0, -1))
    rows = {
        "steps": f"{steps} in {seconds:.1f} s",
        "samples": f"{batch * sum(len(own) for own, _ in ranks):,}",
        "loss, first and last": f"{mean(firsts):.3f}, {mean(lasts):.3f}" if firsts else "no steps were left to train",
        "loss on held-out files": f"{final:.3f} nats/byte",
        "checkpoints": f"{stats.saves}, newest {checkpointer.latest}",
        "staged": f"{sum(nbytes for _, nbytes in ranks) / 2**30:.3f} GiB",
        "stall per checkpoint": f"{1e3 * median(stats.stall_seconds):.1f} ms" if stats.stall_seconds else "-",
        "write per checkpoint": f"{1e3 * median(stats.write_seconds):.1f} ms" if stats.write_seconds else "-",
        "shadowed steps per rank": ", ".join(str(steps - len(own)) for own, _ in ranks),
    }
    print("\n" + "\n".join(f"  {name:24} {value}" for name, value in rows.items()), flush=True)


if __name__ == "__main__":
    train()
